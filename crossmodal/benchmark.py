"""Zero-shot classification and retrieval that honour the cell a model was trained with.

    python crossmodal/benchmark.py --run=results/train_clip/dot-seed0-1a2b3c4d
    python crossmodal/benchmark.py --run=... --data openmoji openmoji:group
    python crossmodal/benchmark.py --model=ViT-B-32 --pretrained=weights.pt --data='wds:test-*.tar'
    python crossmodal/benchmark.py --model=local-dir:FOLDER --data=clip-benchmark:wds/x --root=x
    python crossmodal/benchmark.py --embeddings=features.safetensors

Every model is scored with each cell, from features computed once. A query's own norm never changes
its ranking, so some cells tie by construction; the tables show them as one row. Beside the tables
there are a CSV and, in clip_benchmark/, files that `clip_benchmark build` reads.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offsphere.names import check_similarities
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse, settings_hash, to_dict, where
from offsphere.run.files import atomic_write
from offsphere.run.progress import speaking
from offsphere.run.record import find_run, provenance, write_json
from offsphere.training.settings import canonical_eval_cell

if TYPE_CHECKING:
    from torch import Tensor

    from crossmodal.features import Features
    from crossmodal.subjects import Subject

Exponents = tuple[float, float]
Interval = tuple[float, float]

RECALLS = (1, 5, 10)
LEVEL = 0.95


class Direction(NamedTuple):
    """Metrics with one query side: a ranking depends on the candidates' exponent alone."""

    title: str
    query: str
    candidates: Literal["left", "right"]
    metrics: dict[str, str]
    """Our names and those of clip-benchmark, which says what is retrieved."""


CLASSES = {"top1": "acc1", "top5": "acc5", "mean_class_recall": "mean_per_class_recall"}
TO_TEXT = {f"i2t_r{k}": f"text_retrieval_recall@{k}" for k in RECALLS}
TO_IMAGE = {f"t2i_r{k}": f"image_retrieval_recall@{k}" for k in RECALLS}
DIRECTIONS = {
    "zeroshot_classification": (Direction("image to class", "image", "right", CLASSES),),
    "zeroshot_retrieval": (
        Direction("image to text", "image", "right", TO_TEXT),
        Direction("text to image", "text", "left", TO_IMAGE),
    ),
}


@dataclass(frozen=True)
class Config:
    """`--run`, `--model` with `--pretrained`, or `--embeddings`."""

    run: str | None = where(None)
    """The folder of a run of train_clip.py, or the beginning of its name."""
    model: str | None = None
    """An open_clip name, a JSON file such as those in configs/models, local-dir:FOLDER or
    hf-hub:NAME."""
    pretrained: str | None = None
    """The model's weights: a local file or open_clip's tag."""
    embeddings: str | None = None
    """Raw embeddings in .safetensors or .npz: images, texts and owner (the image of each text), or
    images, labels and class_texts (and class_owner)."""
    data: tuple[str, ...] = ()
    """csv:FILE, wds:PATTERN, folder:PATH, clip-benchmark:NAME, emoji, openmoji, emoji:group,
    emoji:subgroup; default: a run's own data, a --model has none."""
    split: str | None = None
    """Default: all of wds: and csv: data, test of any other."""
    root: str | None = None
    """Where clip-benchmark's data lies."""
    language: str = "en"
    """Of clip-benchmark's class names and prompts."""
    templates: str | None = None
    """Prompts: a name in crossmodal/prompts or a FILE.txt, one per line with {c} for the class."""
    captions_per_image: int | None = None
    """Use only the first so many; default: all, of emoji the name alone."""
    limit: int | None = None
    """At most this many images."""
    eval_cell: str | None = None
    """The cell of the headline numbers; default: the one trained with, cosine if unknown."""
    similarities: tuple[str, ...] = ()
    """Post-hoc similarities such as centred, whitened or csls: fitted on one half of the images
    and judged on the other, beside cosine."""
    resamples: int = 1000
    """Bootstrap samples of the intervals, drawn over images."""
    seed: int = 0
    """Of the bootstrap."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A damaged image is an error, or is left out and counted."""
    batch_size: int = where(64)
    workers: int = where(0)
    """Processes that read clip-benchmark's map-style data."""
    threads: int = where(2)
    download: bool = where(False)
    """Let torchvision fetch clip-benchmark's data."""
    cache: bool = where(True)
    """Keep features in the user's cache; the key holds weights, data and preprocessing."""
    save_embeddings: bool = where(False)
    """Save the raw embeddings of each data set."""
    device: Literal["auto", "cpu", "cuda", "mps"] = where("auto")
    out: str = where("results")
    """Where the numbers go, unless it is a run: its numbers go into its own folder."""

    def __post_init__(self) -> None:
        if self.run is not None:
            object.__setattr__(self, "run", find_run(self.run))
        if sum(x is not None for x in (self.run, self.model, self.embeddings)) != 1:
            raise ValueError("Give one of --run=FOLDER, --model=NAME and --embeddings=FILE.")
        if self.model is None and self.pretrained is not None:
            raise ValueError("--pretrained goes with --model.")
        if self.embeddings is not None and self.data:
            raise ValueError("--data goes with --run or --model: embeddings are their own data.")
        if self.model is not None and not self.data:
            raise ValueError(
                "--model needs --data, what it is to be measured on: your own pictures and texts "
                "(csv:FILE, wds:PATTERN, folder:PATH), a public set (clip-benchmark:NAME with "
                "--root), or emoji for a first try."
            )
        if self.eval_cell is not None:
            object.__setattr__(self, "eval_cell", canonical_eval_cell(self.eval_cell))
        check_similarities(self.similarities)
        least = {"resamples": 1, "batch_size": 1, "threads": 1, "captions_per_image": 1, "limit": 2}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least {number}, got {value}.")


class Benchmarked(NamedTuple):
    """What is scored, and how."""

    model: str
    pretrained: str
    trained_with: str
    cells: dict[str, Exponents]
    own: str
    """The one of the cells that gives the headline."""


class Scores(NamedTuple):
    """One data set and task scored with every cell; the outer keys are cells."""

    data: str
    task: str
    features: Features
    skipped: int
    metrics: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, Interval]]
    against_cosine: dict[str, dict[str, tuple[float, float, float]]]
    """Difference to the cosine cell on the same examples, and its interval."""
    outcomes: dict[str, dict[str, Tensor]]


def run(config: Config) -> dict[str, Any]:
    """Score, write and show the numbers; return those of the own cell."""
    import torch

    torch.set_num_threads(config.threads)
    if config.embeddings is None:
        what, scores = of_model(config, subject_of(config))
    else:
        what, scores = of_embeddings(config)
    folder = write(config, what, scores)
    show(what, scores, folder)
    if config.similarities:
        rows = [row for found in scores for row in similarity_rows(config, found)]
        _write_csv(folder / "similarities.csv", rows)
        show_similarities(rows, folder)
    return {
        f"{found.data}/{name}": value
        for found in scores
        for name, value in found.metrics[what.own].items()
    }


def subject_of(config: Config) -> Subject:
    """The run or the open_clip model that the flags name."""
    from crossmodal import subjects
    from offsphere.training.ranks import choose_device

    device = choose_device(config.device)
    if config.run is not None:
        return subjects.from_run(Path(config.run), device)
    return subjects.from_open_clip(str(config.model), config.pretrained, device)


def of_model(config: Config, subject: Subject) -> tuple[Benchmarked, list[Scores]]:
    """A run or an open_clip model on each data set."""
    from crossmodal import features
    from offsphere.encoders.store import Store, cache_folder

    cells, own = cells_of(config, subject.exponents)
    names = [field.name for field in dataclasses.fields(features.Reading)]
    reading = features.Reading(**{name: getattr(config, name) for name in names})
    if not config.data:
        reading = dataclasses.replace(reading, split=config.split or subject.split)
    store = Store(cache_folder() if config.cache else None)
    scores = []
    for data in config.data or subject.data:
        for examples in features.load_examples(data, subject, reading):
            embedded = features.encode(subject, examples, store)
            found = score(examples.name, examples.task, embedded, cells, config)
            scores.append(found._replace(skipped=len(examples.skipped)))
    return Benchmarked(subject.name, subject.pretrained, subject.trained_with, cells, own), scores


def of_embeddings(config: Config) -> tuple[Benchmarked, list[Scores]]:
    """Embeddings that somebody else computed."""
    from crossmodal.features import read_embeddings

    file = Path(str(config.embeddings))
    cells, own = cells_of(config, (1.0, 1.0))
    scores = [
        score(file.stem, task, features, cells, config)
        for task, features in read_embeddings(file).items()
    ]
    return Benchmarked(file.stem, "embeddings", "unknown", cells, own), scores


def cells_of(config: Config, trained: Exponents) -> tuple[dict[str, Exponents], str]:
    """The cells to score with, and the name of the one for the headline."""
    from offsphere.cells import Cell
    from offsphere.evaluation.retrieval import cells_to_score

    own = trained
    if config.eval_cell is not None:
        left, right = Cell(config.eval_cell).exponents
        own = (float(left), float(right))
    cells = cells_to_score(trained) | cells_to_score(own)
    return cells, next(name for name, exponents in cells.items() if exponents == own)


def score(
    data: str, task: str, features: Features, cells: dict[str, Exponents], config: Config
) -> Scores:
    """Every cell's metrics from the same features, with bootstrap intervals over images."""
    from crossmodal import uncertainty
    from offsphere.evaluation import retrieval, zero_shot

    images, texts, owner, labels = features
    if labels is None:
        found = retrieval.scored_with(images, texts, owner, cells, RECALLS)
    else:
        classes = int(owner.max()) + 1
        found = zero_shot.scored_with(images, texts, owner, classes, labels, cells)
    drawn: dict[str, dict[str, Tensor]] = {}
    for name, result in found.items():
        times, seed = config.resamples, config.seed
        drawn[name] = (
            retrieval.bootstrap(result.outcomes, owner, times=times, seed=seed)
            if labels is None
            else zero_shot.bootstrap(result.outcomes, times=times, seed=seed)
        )
    metrics = {name: with_chance(result.metrics) for name, result in found.items()}
    outcomes = {name: result.outcomes for name, result in found.items()}
    return Scores(
        data,
        task,
        features,
        skipped=0,
        metrics=metrics,
        intervals=uncertainty.intervals(metrics, drawn, len(images), LEVEL),
        against_cosine=uncertainty.minus_cosine(
            metrics, drawn, outcomes, owner if labels is None else None, cells, LEVEL
        ),
        outcomes=outcomes,
    )


def with_chance(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with chance_<metric> for each of them."""
    if "chance" not in metrics:
        chance = (metrics["chance_i2t_r1"] + metrics["chance_t2i_r1"]) / 2
        return metrics | {"chance_mean_r1": chance}
    by_guessing = {"top1": 1, "mean_class_recall": 1, "top5": 5}
    return {name: x for name, x in metrics.items() if name != "chance"} | {
        f"chance_{name}": tries * metrics["chance"]
        for name, tries in by_guessing.items()
        if name in metrics
    }


def write(config: Config, what: Benchmarked, scores: list[Scores]) -> Path:
    """Write every file of the benchmark and return their folder."""
    from offsphere.training.run import save_tensors

    name = f"{slug(what.model)}-{slug(what.pretrained)}-{settings_hash(config)}"
    folder = Path(config.out) / "benchmark" / name
    if config.run is not None:
        folder = Path(config.run) / f"benchmark-{settings_hash(config)}"
    (folder / "clip_benchmark").mkdir(parents=True, exist_ok=True)
    rows = [row for found in scores for row in table_rows(what, found)]
    _write_csv(folder / "results.csv", rows)
    outcomes = {}
    for found in scores:
        for cell in what.cells:
            file = f"{slug(found.data)}-{found.task}-{slug(cell)}.json"
            content = clip_benchmark_schema(config, what, found, cell)
            write_json(folder / "clip_benchmark" / file, content)
            for key, values in found.outcomes[cell].items():
                outcomes[f"{found.data}/{found.task}/{cell}/{key}"] = values.float()
        if config.save_embeddings:
            save_embeddings(folder, found)
    save_tensors(folder / "examples.safetensors", outcomes)
    record = {"settings": to_dict(config), "cells": what.cells, "own": what.own}
    write_json(folder / "provenance.json", {**record, **provenance(None)})
    return folder


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, lambda file: file.write(text.getvalue().encode()))


def similarity_rows(config: Config, found: Scores) -> list[dict[str, Any]]:
    """Recall at 1 (of classes the accuracy) of cosine and each similarity, on half the images."""
    from crossmodal.audit_measures import in_float64, remedies, search_of

    features, rows = in_float64(found), []
    for direction in DIRECTIONS[found.task]:
        judged = remedies(
            search_of(features, direction), len(features.images), config.resamples, config.seed,
            config.similarities,
        )  # fmt: skip
        for row in judged.rows:
            difference = row.minus_cosine
            rows.append(
                {
                    "data": found.data,
                    "task": found.task,
                    "query": direction.query,
                    "metric": next(iter(direction.metrics)),
                    "similarity": row.name,
                    "value": row.recall,
                    "minus_cosine": difference and difference.value,
                    "minus_cosine_low": difference and difference.low,
                    "minus_cosine_high": difference and difference.high,
                    "level": judged.level,
                    "fitted_on_images": judged.reference,
                    "judged_on_images": judged.judged,
                    "problem": row.problem,
                }
            )
    return rows


def show_similarities(rows: list[dict[str, Any]], folder: Path) -> None:
    """One table of all data sets and query sides."""
    from rich.console import Console
    from rich.table import Table

    table = Table("data", "query", "similarity", "metric", title="Post-hoc similarities")
    for column in ("value", "minus cosine"):
        table.add_column(column, justify="right")
    for row in rows:
        difference = "ranks alike" if row["problem"] is None else row["problem"]
        if row["minus_cosine"] is not None:
            low, high = 100 * row["minus_cosine_low"], 100 * row["minus_cosine_high"]
            difference = f"{100 * row['minus_cosine']:+.1f} [{low:+.1f}, {high:+.1f}]"
        names = [row[key] for key in ("data", "query", "similarity", "metric")]
        table.add_row(*names, f"{row['value']:.1%}", difference)
    console = Console()
    console.print(table)
    console.print(
        f"Fitted on {rows[0]['fitted_on_images']} images and judged on the other "
        f"{rows[0]['judged_on_images']}; intervals of {rows[0]['level']:.1%} each hold together "
        f"with {LEVEL:.0%}. {folder}: similarities.csv",
        soft_wrap=True,
    )


def save_embeddings(folder: Path, found: Scores) -> None:
    """The raw embeddings of a data set, as `--embeddings` reads them."""
    from offsphere.training.run import save_tensors

    images, texts, owner, labels = found.features
    tensors = {"images": images, "texts": texts, "owner": owner}
    if labels is not None:
        tensors = {"images": images, "labels": labels, "class_texts": texts, "class_owner": owner}
    save_tensors(folder / f"embeddings-{slug(found.data)}-{found.task}.safetensors", tensors)


def table_rows(what: Benchmarked, found: Scores) -> list[dict[str, Any]]:
    """One row per metric and cell, as the CSV has them."""
    from offsphere.evaluation.retrieval import same_ranking

    rows = []
    for direction in DIRECTIONS[found.task]:
        ties = {
            name: [other for other in group if other != name]
            for group in same_ranking(what.cells, direction.candidates)
            for name in group
        }
        for metric in direction.metrics:
            for cell, metrics in found.metrics.items():
                if metric not in metrics:
                    continue
                low, high = found.intervals[cell][metric]
                difference, least, most = found.against_cosine[cell][metric]
                rows.append(
                    {
                        "model": what.model,
                        "pretrained": what.pretrained,
                        "data": found.data,
                        "task": found.task,
                        "query": direction.query,
                        "metric": metric,
                        "trained_with": what.trained_with,
                        "scored_with": cell,
                        "own": cell == what.own,
                        "ties_by_construction": " ".join(ties[cell]),
                        "value": metrics[metric],
                        "low": low,
                        "high": high,
                        "chance": metrics[f"chance_{metric}"],
                        "majority": metrics.get("majority") if metric == "top1" else None,
                        "minus_cosine": difference,
                        "minus_cosine_low": least,
                        "minus_cosine_high": most,
                        "images": len(found.features.images),
                        "texts": len(found.features.texts),
                        "skipped": found.skipped,
                    }
                )
    return rows


def clip_benchmark_schema(
    config: Config, what: Benchmarked, found: Scores, cell: str
) -> dict[str, Any]:
    """What clip-benchmark's own evaluation would write, with our columns beside it."""
    metrics: dict[str, float] = {}
    for direction in DIRECTIONS[found.task]:
        for ours, theirs in direction.metrics.items():
            value = found.metrics[cell].get(ours, float("nan"))
            low, high = found.intervals[cell].get(ours, (float("nan"),) * 2)
            metrics |= {theirs: value, f"{theirs}_low": low, f"{theirs}_high": high}
            metrics[f"{theirs}_chance"] = found.metrics[cell].get(f"chance_{ours}", float("nan"))
    return {
        "dataset": found.data,
        "model": what.model,
        "pretrained": what.pretrained,
        "task": found.task,
        "metrics": metrics,
        "language": config.language,
        "trained_with": what.trained_with,
        "scored_with": cell,
        "queries": ", ".join(direction.query for direction in DIRECTIONS[found.task]),
    }


def show(what: Benchmarked, scores: list[Scores], folder: Path) -> None:
    """A table per data set and query side; cells that tie by construction share a row."""
    from rich.console import Console
    from rich.table import Table

    from offsphere.evaluation.retrieval import same_ranking

    console = Console()
    for found in scores:
        for direction in DIRECTIONS[found.task]:
            shown = [m for m in direction.metrics if m in found.metrics[what.own]]
            title = f"{found.data}: {direction.title}, the {direction.query} is the query"
            table = Table("scored with", title=title)
            for metric in [*shown, f"{shown[0]} minus cosine"]:
                table.add_column(metric, justify="right")
            for group in same_ranking(what.cells, direction.candidates):
                own = what.own in group
                cells = [_cell_text(found, group[0], metric) for metric in shown]
                cells.append("" if "cosine" in group else _change(found, group[0], shown[0]))
                table.add_row(" = ".join(group), *cells, style="bold" if own else None)
            chance = [f"{found.metrics[what.own][f'chance_{metric}']:.1%}" for metric in shown]
            table.add_row("chance", *chance, "", style="dim")
            console.print(table)
    console.print(
        f"{what.model} {what.pretrained}, trained with {what.trained_with}; bold: scored with "
        f"{what.own}. In brackets: {LEVEL:.0%} intervals over images; differences in points, "
        "paired. Cells with the same exponent on the candidates' side tie by construction.",
        f"{folder}: results.csv, examples.safetensors, clip_benchmark/*.json",
        sep="\n",
        soft_wrap=True,
    )


def _cell_text(found: Scores, cell: str, metric: str) -> str:
    low, high = found.intervals[cell][metric]
    return f"{found.metrics[cell][metric]:.1%} [{100 * low:.1f}, {100 * high:.1f}]"


def _change(found: Scores, cell: str, metric: str) -> str:
    value, low, high = (100 * x for x in found.against_cosine[cell][metric])
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def slug(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_.")[-80:] or "_"


def main() -> None:
    """Flags in, tables out."""
    with one_line_errors("benchmark", "Nothing was written."), speaking():
        config = parse(Config, description=__doc__)
        run(config)


if __name__ == "__main__":
    main()
