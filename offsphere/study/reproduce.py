"""`offsphere reproduce STUDY`: rows of a study's table, made again and compared digit by digit.

    offsphere reproduce results/symmetry              five rows, drawn at random
    offsphere reproduce results/symmetry --run=NAME   this one

The runs go to a folder of their own, --out. A number that differs is named; another kind of
processor or other versions of the packages may change last digits, and both are said then.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offsphere.data.needs import refuse_commands, refuse_missing
from offsphere.names import unknown
from offsphere.run.config import check_positive, command, from_dict, keyboard, parse, run_name
from offsphere.run.record import RunFolder
from offsphere.run.scripts import Scripts
from offsphere.study.display import Display
from offsphere.study.execution import execute
from offsphere.study.local import LocalEngine
from offsphere.study.plan import Run, equipped
from offsphere.study.tables import RUNS

# How a row was made, not what came out of it.
NOT_COMPARED = "run/"
# Settings that only say how a run runs, and yet add columns to its row.
MEASURED = ("similarities", "reader", "reader_passages")
MADE_WITH = ("cpu", "python", "versions", "data")


@dataclass(frozen=True)
class ReproduceSettings:
    study: str
    """STUDY, the folder of a study with its runs.csv; the flag may be left out."""
    rows: int = 5
    """How many rows."""
    pick: int = 0
    """Another number draws other rows."""
    run: tuple[str, ...] = ()
    """Rows by their names, instead of drawn ones."""
    workers: int = 1
    """Runs at a time."""
    out: str = "results/reproduced"
    """Where the runs go."""
    data_root: str | None = None
    """Where data with a name lie; default: OFFSPHERE_DATA."""
    allow_pipe: bool = keyboard(False)
    """Let wds:pipe: data run the commands that they are."""

    def __post_init__(self) -> None:
        check_positive("--rows", self.rows)
        check_positive("--workers", self.workers)


def main(argv: Sequence[str], scripts: Scripts) -> None:
    """Make rows again; exit 0 if all numbers are the same, 1 if not, 2 for a faulty flag."""
    settings = parse(
        ReproduceSettings,
        argv,
        description=__doc__,
        name="offsphere reproduce",
        words=("study", "STUDY"),
    )
    try:
        rows = _chosen(Path(settings.study), settings.run, settings.rows, settings.pick)
        out = Path(settings.out)
        runs = [_run(row, scripts, out, Path(settings.study).resolve().name) for row in rows]
        runs = equipped(runs, data_root=settings.data_root, allow_pipe=settings.allow_pipe)
        for run in runs:
            print(command(run.script.path, run.settings))
        to_do = [run.settings for run in runs if RunFolder(run.path).state != "finished"]
        refuse_commands(to_do, allowed=settings.allow_pipe)
        refuse_missing(to_do)
        differ = _made_again(runs, rows, settings.workers)
    except (ValueError, OSError) as error:
        print(f"offsphere reproduce: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("Stopped; the same command resumes.", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"{len(rows) - differ} of {len(rows)} rows are equal to the last digit.")
    if differ:
        raise SystemExit(1)


def _chosen(study: Path, names: Sequence[str], count: int, pick: int) -> list[dict[str, Any]]:
    """The named rows, or some of the finished ones, drawn at random."""
    from offsphere.analysis.tables import stored_rows

    rows = {row["run"]: row for row in stored_rows(study / RUNS) if row.get("status") == "finished"}
    if not rows:
        raise ValueError(f"{study / RUNS} has no finished run: name the folder of a study.")
    for name in names:
        if name not in rows:
            raise unknown(f"finished run of {study}", name, rows)
    drawn = random.Random(pick).sample(sorted(rows), min(count, len(rows)))
    return [rows[name] for name in names or drawn]


def settings_in(row: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """The settings that a row gives a run: those of its name, and what else it measured.

    Where and how it runs is for the command line: a path in somebody's table leads nowhere here.
    An empty cell is a setting at its default, as in rows that are older than the setting.
    """
    known = [
        field.name
        for field in fields(config_class)
        if not field.metadata.get("unhashed") or field.name in MEASURED
    ]
    given = {name: row[name] for name in known if row.get(name) is not None}
    permissions = {f.name for f in fields(config_class) if f.metadata.get("keyboard")}
    return given | {name: row[name] for name in permissions if row.get(name) is not None}


def _run(row: Mapping[str, Any], scripts: Scripts, out: Path, study: str) -> Run:
    """A row's settings as a run below `out`; they must still give the row's name."""
    name = str(row.get("script"))
    if name not in scripts:
        raise unknown("script", name, scripts)
    script = scripts[name]()
    given = settings_in(row, script.config_class)
    settings = from_dict(script.config_class, given | {"out": str(out), "study": study})
    if run_name(settings) != row["run"]:
        raise ValueError(
            f"The settings of {row['run']} now have the name {run_name(settings)}: the row was "
            f"made by other code. Check out its commit, {row.get('commit')}."
        )
    return Run(name, script, settings, ({},))


def _made_again(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], workers: int) -> int:
    """Do the runs and print how each compares with its row; how many differ."""
    to_do = [run for run in runs if RunFolder(run.path).state != "finished"]
    with (
        contextlib.closing(LocalEngine(workers, [run.script for run in runs])) as engine,
        Display("again", runs, len(runs) - len(to_do), 0, None) as display,
    ):
        for event in execute(to_do, engine, lambda: 0):
            display.show(event)
    return sum(_compared(run, row) for run, row in zip(runs, rows, strict=True))


def _compared(run: Run, row: Mapping[str, Any]) -> bool:
    """Print whether a run has the numbers of its row; true if it has not."""
    from offsphere.analysis.tables import run_row

    again = run_row(run.path)
    if again["status"] != "finished":
        print(f"{run.path.name}: did not finish: {again['reason']}")
        return True
    differ = list(_differences(row, again))
    count = sum(_is_compared(name, value) for name, value in row.items())
    print(f"{run.path.name}: {count - len(differ)} of {count} numbers are equal")
    for line in differ:
        print(f"  {line}")
    if differ:
        for name in (f"run/{name}" for name in MADE_WITH):
            if row.get(name) != again.get(name):
                print(f"  {name} was {row.get(name)} and is {again.get(name)}")
    return bool(differ)


def _differences(row: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    for name, before in row.items():
        if _is_compared(name, before) and repr(before) != repr(now := again.get(name)):
            yield f"{name} was {before} and is {now}"


def _is_compared(name: str, value: Any) -> bool:
    return "/" in name and not name.startswith(NOT_COMPARED) and value is not None
