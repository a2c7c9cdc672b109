"""What has been made already: here, in a table whose run folders stayed elsewhere, or by another
study.

A clone has a study's tables but not its run folders. Where a run has no folder its row of runs.csv
stands for it, so that a study continues from what is committed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from offsphere.run.config import to_yaml
from offsphere.run.record import RunFolder
from offsphere.study.plan import Run
from offsphere.study.tables import RUNS, copy_rows

ENDED = ("finished", "failed")


def state_of(path: Path) -> str:
    """A run's state, by its folder; where it has none, by its row: new, cut, finished or failed."""
    stored = _row(path).get("status")
    return stored if stored in ENDED else RunFolder(path).state


def metrics_of(path: Path) -> dict[str, Any]:
    """What a run measured, from its folder or its row; empty if it has not ended."""
    row = _row(path)
    if row.get("status") not in ENDED:
        return RunFolder(path).metrics()
    measured = {name: value for name, value in row.items() if "/" in name and value is not None}
    return {**measured, "run/status": row["status"], "run/reason": row["reason"]}


def rows_only(runs: Iterable[Run]) -> int:
    """How many of the runs have ended elsewhere: they have a row, but no folder."""
    return sum(_row(run.path).get("status") in ENDED for run in runs)


def finished_below(out: Path, script: str) -> Iterator[dict[str, Any]]:
    """The row of every finished run of a script, from its folder or from a table."""
    from offsphere.analysis.tables import run_row

    rows = [run_row(file.parent) for file in out.rglob("metrics.json")]
    for table in out.rglob(RUNS):
        rows += [_row(table.with_name(name)) for name in _rows(table)]
    yield from (row for row in rows if _is_finished(row, script))


def take_over(runs: Iterable[Run], out: str) -> int:
    """Take runs that have not begun from other studies below `out`; how many there were.

    A finished run of the same script and settings would only be repeated, to the last digit.
    """
    folders, rows = 0, list[tuple[Path, Run]]()
    for run in runs:
        made = made_elsewhere(run, out)
        if made is None:
            continue
        if (made / "config.yaml").exists():
            _copy(made, run, out)
            folders += 1
        else:
            rows.append((made.parent, run))
    for source in {study for study, _ in rows}:
        copy_rows(source, [run for study, run in rows if study == source])
    return folders + len(rows)


def made_elsewhere(run: Run, out: str) -> Path | None:
    """Where another study below `out` has finished a run that has not begun here, as a folder or,
    if there is none, as a row."""
    if state_of(run.path) != "new":
        return None
    return _folder_elsewhere(run, out) or _row_elsewhere(run, out)


def _row(path: Path) -> dict[str, Any]:
    """The row that stands for a run without a folder; empty if there is none."""
    if (path / "config.yaml").exists():
        return {}
    return _rows(path.parent / RUNS).get(path.name, {})


def _is_finished(row: dict[str, Any], script: str) -> bool:
    return (row.get("status"), row.get("script")) == ("finished", script)


def _rows(table: Path) -> dict[str, dict[str, Any]]:
    """A table's rows by run."""
    return _read_rows(table, table.stat().st_mtime_ns) if table.exists() else {}


@lru_cache(maxsize=32)
def _read_rows(table: Path, _changed: int) -> dict[str, dict[str, Any]]:
    from offsphere.analysis.tables import stored_rows

    return {row["run"]: row for row in stored_rows(table)}


def _folder_elsewhere(run: Run, out: str) -> Path | None:
    for path in sorted(Path(out).glob(f"[!.]*/{run.path.name}")):
        folder = RunFolder(path)
        if folder.state == "finished" and folder.provenance().get("script") == run.name:
            return path
    return None


def _row_elsewhere(run: Run, out: str) -> Path | None:
    for table in sorted(Path(out).glob(f"[!.]*/{RUNS}")):
        if _is_finished(_row(path := table.with_name(run.path.name)), run.name):
            return path
    return None


def _copy(made: Path, run: Run, out: str) -> None:
    """Copy the run's folder, whole or not at all; its files are linked where that is possible."""
    with tempfile.TemporaryDirectory(prefix=".taking-", dir=out) as folder:
        copy = Path(folder) / run.path.name
        shutil.copytree(made, copy, copy_function=_link, ignore=shutil.ignore_patterns(".lock"))
        (copy / "config.yaml").unlink()  # a link: what it is linked with must not change
        (copy / "config.yaml").write_text(to_yaml(run.settings))
        run.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run.path, ignore_errors=True)
        copy.rename(run.path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
