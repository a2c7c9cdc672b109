"""How an audit and a benchmark are shown and written: from their table, in one place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from offsphere.audit.page import page
from offsphere.audit.report import Report
from offsphere.audit.scoring import How
from offsphere.audit.search import Direction
from offsphere.audit.settings import AuditSettings
from offsphere.audit.table import Problem, Table
from offsphere.audit.words import percent, points, shown_remedies
from offsphere.run.config import settings_hash, to_dict
from offsphere.run.files import write_whole
from offsphere.run.record import provenance, write_json


def write_table(folder: Path, table: Table) -> None:
    """The table as results.csv."""
    write_whole(folder / "results.csv", table.csv())


def write_report(folder: Path, report: Report) -> None:
    """results.csv, audit.json and audit.html."""
    text = page(report)  # may fail: nothing is written before
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder, report.table)
    write_json(folder / "audit.json", report.content())
    write_whole(folder / "audit.html", text)


def finish(config: AuditSettings, report: Report) -> Path:
    """Write a report below `--out`, with its settings and the machine, and show it."""
    folder = Path(config.out) / "audit" / f"{slug(report.name)}-{settings_hash(config)}"
    write_report(folder, report)
    record = {"settings": to_dict(config), "trained_with": report.trained_with}
    write_json(folder / "provenance.json", {**record, **report.how._asdict(), **provenance(None)})
    show_report(report, folder)
    return folder


def show_report(report: Report, folder: Path) -> None:
    """What to do in one line, what follows from what; a table per data set and direction."""
    console = Console()
    console.print(Text(report.headline, style="bold"), soft_wrap=True)
    for advice in report.advice:
        console.print(Text(f"{advice.data}, {advice.direction}", style="bold"))
        # What a single direction says first is the headline.
        for statement in advice.statements[len(report.advice) == 1 :]:
            console.print(Text(f"  {statement.verdict}. {statement.text}"), soft_wrap=True)
    for direction in itertools.chain(*report.directions):
        queries = report.table.value(*direction.place, metric="queries")
        title = f"{direction.data}: {direction.title}, {queries:.0f} queries"
        shown = Shown("scored with", direction.metric, "minus cosine", title=Text(title))
        for cells in report.how.groups(direction):
            value = report.table.value(*direction.place, cells[0], direction.metric)
            gain = report.table.get(*direction.place, cells[0], f"{direction.metric}_minus_cosine")
            change = points(gain) if gain and "cosine" not in cells else ""
            shown.add_row(" = ".join(cells), f"{value:.1%}", Text(change))
        shown.add_section()
        for remedy in shown_remedies(report.table, direction, report.problems):
            gain = points(remedy.gain) if remedy.gain else remedy.remark
            shown.add_row(f"{remedy.name}, judged half", remedy.value, Text(gain))
        console.print(shown)
    console.print(Text(f"{folder}: audit.html, audit.json, results.csv"), soft_wrap=True)


def show_scores(table: Table, directions: Sequence[Direction], how: How) -> None:
    """A table per data set and query side; cells that tie by construction share a row."""
    console = Console()
    for direction in directions:
        title = f"{direction.data}: {direction.title}, the {direction.query} is the query"
        shown = Shown("scored with", title=title)
        for metric in (*direction.metrics, f"{direction.metric} minus cosine"):
            shown.add_column(metric, justify="right")
        for cells in how.groups(direction):
            values = [table.get(*direction.place, cells[0], metric) for metric in direction.metrics]
            row = [percent(x) for x in values if x is not None]
            gain = table.get(*direction.place, cells[0], f"{direction.metric}_minus_cosine")
            row.append(f"{gain.times(100):+.1f}" if gain and "cosine" not in cells else "")
            shown.add_row(" = ".join(cells), *row, style="bold" if how.own in cells else None)
        chance = [f"{table.value(*direction.place, 'chance', m):.1%}" for m in direction.metrics]
        shown.add_row("chance", *chance, "", style="dim")
        console.print(shown)


def show_remedies(
    table: Table, directions: Sequence[Direction], problems: Sequence[Problem]
) -> None:
    """One table of the post-hoc similarities, of all data sets and query sides."""
    console = Console()
    shown = Shown("data", "query", "similarity", "metric", title="Post-hoc similarities")
    for column in ("value", "minus cosine"):
        shown.add_column(column, justify="right")
    for direction in directions:
        for name, value, gain, remark in shown_remedies(table, direction, problems):
            change = f"{gain.times(100):+.1f}" if gain else remark
            shown.add_row(direction.data, direction.query, name, direction.metric, value, change)
    console.print(shown)
    fitted, judged, level = (
        table.value(*directions[0].place, metric=name)
        for name in ("fitted_on", "judged_on", "remedies_level")
    )
    console.print(
        f"Fitted on {fitted:.0f} {directions[0].examples} and judged on the other {judged:.0f}; "
        f"intervals of {level:.1%} each hold together with 95%.",
        soft_wrap=True,
    )


def slug(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("_.")[-80:] or "_"
