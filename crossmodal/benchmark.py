"""Zero-shot classification and retrieval that honour the cell a model was trained with.

    python crossmodal/benchmark.py --run=results/train_clip/dot-seed0-1a2b3c4d
    python crossmodal/benchmark.py --run=... --data openmoji openmoji:group
    python crossmodal/benchmark.py --model=ViT-B-32 --pretrained=weights.pt --data='wds:test-*.tar'
    python crossmodal/benchmark.py --model=local-dir:FOLDER --data=clip-benchmark:wds/x --root=x
    python crossmodal/benchmark.py --embeddings=features.safetensors

Every model is scored with each cell, from features computed once. A query's own norm never changes
its ranking, so some cells tie by construction; the tables show them as one row. The same is in
results.csv and, in clip_benchmark/, in files that `clip_benchmark build` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offsphere.names import check_similarities
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse, settings_hash, to_dict, unhashed
from offsphere.run.progress import speaking
from offsphere.run.record import find_run, provenance, write_json
from offsphere.training.settings import canonical_eval_cell, check_setting

if TYPE_CHECKING:
    from crossmodal.searches import Encoded
    from crossmodal.subjects import Subject
    from offsphere.audit.scoring import How
    from offsphere.audit.table import Table


@dataclass(frozen=True)
class Config:
    """`--run`, `--model` with `--pretrained`, or `--embeddings`."""

    run: str | None = unhashed(None)
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
    batch_size: int = unhashed(64)
    workers: int = unhashed(0)
    """Processes that read clip-benchmark's map-style data."""
    threads: int = unhashed(2)
    download: bool = unhashed(False)
    """Let torchvision fetch clip-benchmark's data."""
    cache: bool = unhashed(True)
    """Keep features in the user's cache; the key holds weights, data and preprocessing."""
    save_embeddings: bool = unhashed(False)
    """Save the raw embeddings of each data set."""
    device: Literal["auto", "cpu", "cuda", "mps"] = unhashed("auto")
    out: str = unhashed("results")
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
            check_setting(self, name, f"at least {number}", value is None or value >= number)


class Benchmarked(NamedTuple):
    """What is scored, and how."""

    model: str
    pretrained: str
    trained_with: str
    how: How
    sets: list[Encoded]
    subject: Subject | None
    """None for embeddings that somebody else computed."""


def run(config: Config) -> dict[str, float]:
    """Score, write and show the numbers; return those of the own cell."""
    import torch

    from offsphere.audit.measures import measure_remedies
    from offsphere.audit.output import show_remedies, show_scores
    from offsphere.audit.scoring import LEVEL, score
    from offsphere.audit.table import Table

    torch.set_num_threads(config.threads)
    found, table = encode(config), Table()
    outcomes, problems, directions = {}, [], []
    for encoded in found.sets:
        for search in encoded.searches():
            for cell, result in score(search, found.how, table).items():
                place = f"{encoded.data}/{search.direction.title}/{cell}"
                kept = {**result.values, "rank": result.rank}
                outcomes |= {f"{place}/{metric}": x.float() for metric, x in kept.items()}
            if config.similarities:
                problems += measure_remedies(search, found.how, table, config.similarities)
            directions.append(search.direction)
    folder = write(config, found, table, outcomes)
    show_scores(table, directions, found.how)
    print(
        f"{found.model} {found.pretrained}, trained with {found.trained_with}; bold: scored with "
        f"{found.how.own}. In brackets: {LEVEL:.0%} intervals over images; differences in points, "
        "paired. Cells with the same exponent on the candidates' side tie by construction."
    )
    if config.similarities:
        show_remedies(table, directions, problems)
    print(f"{folder}: results.csv, examples.safetensors, clip_benchmark/*.json")
    return {
        f"{row.data}/{row.metric}": row.value
        for row in table
        if row.scored_with == found.how.own and "_minus_cosine" not in row.metric
    }


def encode(config: Config) -> Benchmarked:
    """A run or an open_clip model on each data set, or embeddings that somebody else computed."""
    from crossmodal import features, subjects
    from crossmodal.searches import Encoded
    from offsphere.audit.scoring import How, cells_of
    from offsphere.encoders.store import Store, cache_folder
    from offsphere.training.ranks import choose_device

    if config.embeddings is not None:
        file = Path(config.embeddings)
        how = How(*cells_of((1.0, 1.0), config.eval_cell), config.resamples, config.seed)
        read = features.read_embeddings(file)
        sets = [Encoded(file.stem, task, found) for task, found in read.items()]
        return Benchmarked(file.stem, "embeddings", "unknown", how, sets, None)
    device = choose_device(config.device)
    if config.run is not None:
        subject = subjects.from_run(Path(config.run), device)
    else:
        subject = subjects.from_open_clip(str(config.model), config.pretrained, device)
    names = [field.name for field in dataclasses.fields(features.Reading)]
    reading = features.Reading(**{name: getattr(config, name) for name in names})
    if not config.data:
        reading = dataclasses.replace(reading, split=config.split or subject.split)
    store = Store(cache_folder() if config.cache else None)
    sets = []
    for data in config.data or subject.data:
        for examples in features.load_examples(data, subject, reading):
            found = features.encode(subject, examples, store)
            sets.append(
                Encoded(examples.name, examples.task, found, sum(examples.skipped.values()))
            )
    how = How(*cells_of(subject.exponents, config.eval_cell), config.resamples, config.seed)
    return Benchmarked(subject.name, subject.pretrained, subject.trained_with, how, sets, subject)


def folder_of(config: Config, kind: str, found: Benchmarked) -> Path:
    """Where results go: into the run's own folder, or below --out."""
    from offsphere.audit.output import slug

    if config.run is not None:
        return Path(config.run) / f"{kind}-{settings_hash(config)}"
    name = f"{slug(found.model)}-{slug(found.pretrained)}-{settings_hash(config)}"
    return Path(config.out) / kind / name


def write(config: Config, found: Benchmarked, table: Table, outcomes: dict[str, Any]) -> Path:
    """Write every file of the benchmark and return their folder."""
    from offsphere.audit.output import slug, write_table
    from offsphere.training.run import save_tensors

    folder = folder_of(config, "benchmark", found)
    (folder / "clip_benchmark").mkdir(parents=True, exist_ok=True)
    write_table(folder, table)
    for encoded in found.sets:
        for cell in found.how.cells:
            file = f"{slug(encoded.data)}-{encoded.task}-{slug(cell)}.json"
            content = clip_benchmark_schema(config, found, encoded, cell, table)
            write_json(folder / "clip_benchmark" / file, content)
    save_tensors(folder / "examples.safetensors", outcomes)
    write_origin(config, found, folder)
    return folder


def write_origin(config: Config, found: Benchmarked, folder: Path) -> None:
    """Settings, cells and machine as provenance.json and, if asked for, the embeddings."""
    from offsphere.audit.output import slug
    from offsphere.training.run import save_tensors

    named = {key: getattr(found, key) for key in ("model", "pretrained", "trained_with")}
    record = {"settings": to_dict(config), **named, **found.how._asdict()}
    write_json(folder / "provenance.json", {**record, **provenance(None)})
    for encoded in found.sets if config.save_embeddings else ():
        name = f"embeddings-{slug(encoded.data)}-{encoded.task}.safetensors"
        save_tensors(folder / name, encoded.tensors())


def clip_benchmark_schema(
    config: Config, found: Benchmarked, encoded: Encoded, cell: str, table: Table
) -> dict[str, Any]:
    """What clip-benchmark's own evaluation would write, with our columns beside it."""
    from crossmodal.searches import THEIRS

    directions = [search.direction for search in encoded.searches()]
    metrics: dict[str, float] = {}
    for words in directions:
        place = (words.data, words.title)
        for ours in words.metrics:
            name, value = THEIRS[ours], table.get(*place, cell, ours)
            assert value is not None
            metrics |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            metrics[f"{name}_chance"] = table.value(*place, "chance", ours)
    return {
        "dataset": encoded.data,
        "model": found.model,
        "pretrained": found.pretrained,
        "task": encoded.task,
        "metrics": metrics,
        "language": config.language,
        "trained_with": found.trained_with,
        "scored_with": cell,
        "queries": ", ".join(words.query for words in directions),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Flags in, tables out."""
    with one_line_errors("benchmark", "Nothing was written."), speaking():
        config = parse(Config, argv, description=__doc__)
        run(config)


if __name__ == "__main__":
    main()
