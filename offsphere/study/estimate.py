"""How long runs may take, from the finished runs of the same script. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offsphere.run.catalog import identity
from offsphere.run.config import settings
from offsphere.study.made import finished_below
from offsphere.study.plan import Run


def estimate(runs: Sequence[Run], out: Path) -> tuple[float | None, int]:
    """Seconds of work for runs of one script, and the number of finished runs to go by."""
    finished = list(finished_below(out, runs[0].name))
    if not finished:
        return None, 0
    return sum(_seconds(run, finished) for run in runs), len(finished)


def _seconds(run: Run, finished: Sequence[dict[str, Any]]) -> float:
    """By the finished runs whose settings are the most alike: their median time per sample seen
    where both sides state samples, else their median time."""
    own = {name: value for name, value in settings(run.config).items() if name != "seed"}
    alike = [
        sum(_identity(row.get(name)) == value for name, value in own.items()) for row in finished
    ]
    nearest = [row for row, count in zip(finished, alike, strict=True) if count == max(alike)]
    samples = own.get("samples")
    rates = [row["run/seconds"] / row["run/samples"] for row in nearest if row.get("run/samples")]
    if samples and rates:
        return samples * statistics.median(rates)
    return statistics.median(row["run/seconds"] for row in nearest)


def _identity(value: Any) -> Any:
    """A cell as settings spell it; rows name data, settings have their committed places."""
    return identity(value) if isinstance(value, str) else value
