"""Runs that another study has already made."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from offsphere.config import to_yaml
from offsphere.record import RunFolder
from offsphere.study.plan import Run


def take_over(runs: Iterable[Run], out: str) -> int:
    """Take runs that have not begun from other studies below `out`; how many there were.

    A finished run of the same script and settings would only be repeated, to the last digit.
    """
    taken = 0
    for run in runs:
        if RunFolder(run.path).state == "new" and (made := _made_elsewhere(run, out)):
            _copy(made, run, out)
            taken += 1
    return taken


def _made_elsewhere(run: Run, out: str) -> Path | None:
    for path in sorted(Path(out).glob(f"[!.]*/{run.path.name}")):
        folder = RunFolder(path)
        if folder.state == "finished" and folder.provenance().get("script") == run.name:
            return path
    return None


def _copy(made: Path, run: Run, out: str) -> None:
    """Copy the run's folder, whole or not at all; its files are linked where that is possible."""
    with tempfile.TemporaryDirectory(prefix=".taking-", dir=out) as folder:
        copy = Path(folder) / run.path.name
        shutil.copytree(made, copy, copy_function=_link, ignore=shutil.ignore_patterns(".lock"))
        (copy / "config.yaml").unlink()  # a link: what it is linked with must not change
        (copy / "config.yaml").write_text(to_yaml(run.config))
        run.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run.path, ignore_errors=True)
        copy.rename(run.path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
