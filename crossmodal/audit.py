"""Does magnitude carry information in a model or in embeddings you already have? No training.

    offsphere audit --run=results/train_clip/dot-seed0-1a2b3c4d
    offsphere audit --model=ViT-B-32 --pretrained=weights.pt --data='wds:test-*.tar'
    offsphere audit --embeddings=features.safetensors

Norms, what they say about right and wrong answers, cosine against dot and one-sided scores, what
post-hoc remedies change on examples they were not fitted on, and whether the text tower holds
shared syntax for shared meaning; with a recommendation in plain words, one line first, as
audit.json and a page, audit.html.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crossmodal import benchmark
from crossmodal.audit_advice import (
    PROBE,
    RULES,
    Advice,
    Rules,
    headline,
    points,
    recommend,
    recommend_from_probe,
)
from crossmodal.benchmark import LEVEL, slug
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse, settings_hash, to_dict
from offsphere.run.files import atomic_write
from offsphere.run.progress import speaking
from offsphere.run.record import provenance, write_json

if TYPE_CHECKING:
    from crossmodal.audit_measures import DataAudit
    from crossmodal.audit_probe import Probe


@dataclass(frozen=True)
class Config(benchmark.Config):
    """`--run`, `--model` with `--pretrained`, or `--embeddings`."""

    eval_cell: str | None = None
    """The cell that decides which answers are right; default: the one trained with, cosine if
    unknown."""
    seed: int = 0
    """Of the bootstrap, and of the halves on which remedies are fitted and judged."""
    probe: bool = True
    """Ask the text tower whether it holds shared syntax for shared meaning."""


@dataclass(frozen=True)
class Report:
    """All of an audit; audit.json holds just this."""

    model: str
    pretrained: str
    trained_with: str
    own: str
    """The cell that decides which answers are right."""
    cells: dict[str, tuple[float, float]]
    level: float
    resamples: int
    seed: int
    rules: Rules
    headline: str
    """What to do, in one line."""
    advice: tuple[Advice, ...]
    data: tuple[DataAudit, ...]
    probe: Probe | None
    """None if there is no text tower, or it was not asked for."""


def run(config: Config) -> Report:
    """Measure, write and show."""
    import torch

    torch.set_num_threads(config.threads)
    report, scores = measure(config)
    folder = write(config, report, scores)
    show(report, folder)
    return report


def measure(config: Config) -> tuple[Report, list[benchmark.Scores]]:
    """The audit, and the benchmark it starts from."""
    from crossmodal.audit_measures import audit
    from crossmodal.audit_probe import prompt_probe

    subject = None if config.embeddings is not None else benchmark.subject_of(config)
    if subject is None:
        what, scores = benchmark.of_embeddings(config)
    else:
        what, scores = benchmark.of_model(config, subject)
    audits = tuple(
        audit(what, found, config.resamples, config.seed, config.similarities) for found in scores
    )
    probe = None
    if config.probe and subject is not None:
        probe = prompt_probe(subject.encode_texts, config.resamples, config.seed)
    advice = [
        Advice(found.data, direction.title, recommend(direction))
        for found in audits
        for direction in found.directions
    ]
    if probe is not None:
        advice.append(Advice(PROBE, "text to text", recommend_from_probe(probe)))
    report = Report(
        model=what.model,
        pretrained=what.pretrained,
        trained_with=what.trained_with,
        own=what.own,
        cells=what.cells,
        level=LEVEL,
        resamples=config.resamples,
        seed=config.seed,
        rules=RULES,
        headline=headline(advice, what.own),
        advice=tuple(advice),
        data=audits,
        probe=probe,
    )
    return report, scores


def write(config: Config, report: Report, scores: list[benchmark.Scores]) -> Path:
    """Write audit.json, audit.html and, if asked for, the embeddings; return their folder."""
    from crossmodal.audit_page import page

    name = f"{slug(report.model)}-{slug(report.pretrained)}-{settings_hash(config)}"
    folder = Path(config.out) / "audit" / name
    if config.run is not None:
        folder = Path(config.run) / f"audit-{settings_hash(config)}"
    text = page(report)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", dataclasses.asdict(report))
    atomic_write(folder / "audit.html", lambda file: file.write(text.encode()))
    write_json(folder / "provenance.json", {"settings": to_dict(config), **provenance(None)})
    if config.save_embeddings:
        for found in scores:
            benchmark.save_embeddings(folder, found)
    return folder


def show(report: Report, folder: Path) -> None:
    """What to do in one line; a table per data set and direction, and what follows from it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(report.headline, style="bold"), soft_wrap=True)
    for found in report.data:
        for direction in found.directions:
            title = f"{found.data}: {direction.title}, {direction.queries} queries"
            table = Table("scored with", direction.metric, "minus cosine", title=Text(title))
            for row in direction.scored:
                value, difference = (
                    estimates[direction.metric] for estimates in (row.metrics, row.minus_cosine)
                )
                gain = "" if "cosine" in row.cells else points(difference)
                table.add_row(" = ".join(row.cells), f"{value.value:.1%}", Text(gain))
            table.add_section()
            for row in direction.remedies.rows:
                gain = row.problem or ""
                if row.minus_cosine is not None:
                    gain = points(row.minus_cosine)
                recall = "" if row.problem else f"{row.recall:.1%}"
                table.add_row(f"{row.name}, judged half", recall, Text(gain))
            console.print(table)
    for advice in report.advice:
        console.print(Text(f"{advice.data}, {advice.direction}", style="bold"))
        for statement in advice.statements:
            console.print(Text(f"  {statement.verdict}. {statement.text}"), soft_wrap=True)
    console.print(Text(f"{folder}: audit.html, audit.json"), soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Flags in, a recommendation out."""
    with one_line_errors("offsphere audit", "Nothing was written."), speaking():
        config = parse(Config, argv, description=__doc__)
        run(config)


if __name__ == "__main__":
    main()
