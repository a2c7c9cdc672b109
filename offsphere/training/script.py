"""What every training script does around its `run(config)`. Imports no torch."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from offsphere.data.needs import refuse_missing
from offsphere.estimate import Estimate
from offsphere.run.command import is_first_process, one_line_errors
from offsphere.run.config import differing_flags, parse
from offsphere.run.files import check_folder
from offsphere.run.progress import say, speaking
from offsphere.run.record import RunFolder, run_path
from offsphere.training.settings import TrainSettings

if TYPE_CHECKING:
    from rich.table import Table

Column = tuple[str, str, str | Callable[[Any], str]]
"""A metric, what its row of the closing table is called, and its format or what spells it."""
LEVEL = 0.95


def main(
    config_class: type,
    run: Callable[[Any], dict[str, Any]],
    columns: tuple[Column, ...],
    description: str | None,
) -> None:
    """Flags in, a table out; a user's mistake ends in one line and a non-zero exit code."""
    script = Path(sys.argv[0]).stem
    remedy = "The same command resumes from the last checkpoint; before the first it starts anew."
    with one_line_errors(script, remedy):
        settings = parse(config_class, description=description)
        check_folder(settings.out)
        folder = run_path(settings, script=script, out=settings.out, study=settings.study)
        with speaking(work=settings.progress):
            flags = " ".join(differing_flags(settings))
            say(f"{script}: {flags or 'all settings at their default'}")
            if not (settings.resume and RunFolder(folder).state == "finished"):
                refuse_missing([settings])
            if not settings.resume and is_first_process():
                _move_aside(folder)
            say(f"Results go to {folder}\nLoading torch and the data ...")
            metrics = run(settings)
        if is_first_process():
            _show(settings, metrics, columns, folder)


def _move_aside(folder: Path) -> None:
    """An earlier run in this folder is kept under a name of its own."""
    if folder.exists():
        names = (folder.with_name(f"{folder.name}.before-{k}") for k in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        with RunFolder(folder, lock=True):  # an error if a process is still at work there
            folder.rename(aside)
        print(f"The earlier run is kept as {aside}.")


def _show(
    settings: TrainSettings, metrics: dict[str, Any], columns: tuple[Column, ...], folder: Path
) -> None:
    from rich.console import Console

    console = Console()
    console.print(closing_table(settings.cell, metrics, columns, _outcomes(folder)))
    console.print(f"{folder}: config.yaml, steps.jsonl, metrics.json, run.png", soft_wrap=True)
    if settings.study is None:
        console.print("One run is no comparison: a study pairs cells over seeds (docs/studies.md).")


def closing_table(
    cell: str, metrics: dict[str, Any], columns: tuple[Column, ...], outcomes: dict[str, Any]
) -> Table:
    """A row for each metric: its value, and of a mean over examples its interval and n."""
    from rich.table import Table

    steps = metrics.get("run/steps")
    about = f"cell {cell}" if steps is None else f"cell {cell}, {steps:,} steps"
    table = Table("", "value", "95 % interval", "n", title=about, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title, form in (column for column in columns if column[0] in metrics):
        spelt = form.format if isinstance(form, str) else form
        found = interval(name, metrics[name], outcomes)
        ends = f"{spelt(found.low)} to {spelt(found.high)}" if found else ""
        table.add_row(title, spelt(metrics[name]), ends, f"{found.n:,}" if found else "")
    return table


def _outcomes(folder: Path) -> dict[str, Any]:
    """What each test example came to, by name; nothing if the run has kept none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(folder / "examples.safetensors")
    except (OSError, SafetensorError):
        return {}


def interval(name: str, value: float, outcomes: dict[str, Any]) -> Estimate | None:
    """A metric with its 95 % interval over the test examples.

    Wilson's for a share of right answers; for another mean (nDCG) 1.96 standard errors. None if
    the metric is no mean over examples that were kept.
    """
    from offsphere.evaluation.intervals import wilson

    group, _, tail = name.partition("/")
    right = outcomes.get(f"{tail}_correct", outcomes.get(tail.replace("_r1", "_hit1")))
    if right is not None and group in ("test", "untrained") and tail not in outcomes:
        return Estimate(value, *wilson(value, len(right), LEVEL), len(right))
    own = outcomes.get(tail if group == "test" else f"{group}_{tail}")
    if own is None or own.ndim != 1 or len(own) < 2 or abs(own.mean() - value) > 1e-4:
        return None
    reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * float(own.std(ddof=1)) / math.sqrt(len(own))
    return Estimate(value, value - reach, value + reach, len(own))
