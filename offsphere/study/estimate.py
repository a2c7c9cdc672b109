"""How long runs may take, from the finished runs of the same script. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from offsphere.record import RunFolder
from offsphere.study.plan import Run


def estimate(runs: Sequence[Run], out: Path) -> tuple[float | None, int]:
    """Seconds of work for runs of one script, and the number of finished runs that say so.

    By the median time per sample seen where both sides state samples, else by the median run.
    """
    finished = _finished(runs[0].name, out)
    if not finished:
        return None, 0
    per_run = statistics.median(seconds for seconds, _ in finished)
    rates = [seconds / samples for seconds, samples in finished if samples]

    def expected(run: Run) -> float:
        samples = getattr(run.config, "samples", None)
        return samples * statistics.median(rates) if samples and rates else per_run

    return sum(map(expected, runs)), len(finished)


def _finished(script: str, out: Path) -> list[tuple[float, float | None]]:
    """Seconds and samples seen of every finished run of a script below `out`."""
    found = []
    for file in out.rglob("metrics.json"):
        run = RunFolder(file.parent)
        metrics = run.metrics()
        if run.state == "finished" and run.provenance().get("script") == script:
            found.append((metrics["run/seconds"], metrics.get("run/samples")))
    return found
