"""What every training script does around its `run(config)`. Imports no torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offsphere.command import is_first_process, one_line_errors
from offsphere.config import parse
from offsphere.needs import refuse_missing
from offsphere.record import RunFolder, run_path
from offsphere.training.settings import TrainSettings

Column = tuple[str, str, str | Callable[[Any], str]]
"""A metric, its title in the closing table, and its format or what spells it."""


def main(
    config_class: type,
    run: Callable[[Any], dict[str, Any]],
    columns: tuple[Column, ...],
    description: str | None,
) -> None:
    """Flags in, a table out; a user's mistake ends in one line and a non-zero exit code."""
    script = Path(sys.argv[0]).stem
    with one_line_errors(script, "The same command goes on from the last checkpoint."):
        config = parse(config_class, description=description)
        folder = run_path(config, script=script, out=config.out, study=config.study)
        if not (config.resume and RunFolder(folder).state == "finished"):
            refuse_missing([config])
        if not config.resume and is_first_process():
            _move_aside(folder)
        metrics = run(config)
        if is_first_process():
            _show(config, metrics, columns, folder)


def _move_aside(folder: Path) -> None:
    """An earlier run in this folder is kept under a name of its own."""
    if folder.exists():
        names = (folder.with_name(f"{folder.name}.before-{k}") for k in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        with RunFolder(folder, lock=True):  # an error if a process is still at work there
            folder.rename(aside)
        print(f"The earlier run is kept as {aside}.")


def _show(
    config: TrainSettings, metrics: dict[str, Any], columns: tuple[Column, ...], folder: Path
) -> None:
    from rich.console import Console
    from rich.table import Table

    present = [column for column in columns if column[0] in metrics]
    table = Table(title=folder.name)
    table.add_column("cell")
    for _, title, _ in present:
        table.add_column(title, justify="right")
    spelt = [
        form.format(metrics[name]) if isinstance(form, str) else form(metrics[name])
        for name, _, form in present
    ]
    table.add_row(config.cell, *spelt)
    console = Console()
    console.print(table)
    console.print(f"{folder}: config.yaml, steps.jsonl, metrics.json, run.png", soft_wrap=True)
