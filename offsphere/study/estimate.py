"""How long runs may take, from the finished runs of the same script. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from offsphere.study.made import finished_below
from offsphere.study.plan import Run


def estimate(runs: Sequence[Run], out: Path) -> tuple[float | None, int]:
    """Seconds of work for runs of one script, and the number of finished runs that say so.

    By the median time per sample seen where both sides state samples, else by the median run.
    """
    finished = list(finished_below(out, runs[0].name))
    if not finished:
        return None, 0
    per_run = statistics.median(metrics["run/seconds"] for metrics in finished)
    seen = [metrics for metrics in finished if metrics.get("run/samples")]
    rates = [metrics["run/seconds"] / metrics["run/samples"] for metrics in seen]

    def expected(run: Run) -> float:
        samples = getattr(run.config, "samples", None)
        return samples * statistics.median(rates) if samples and rates else per_run

    return sum(map(expected, runs)), len(finished)
