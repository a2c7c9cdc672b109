"""What a study has found so far, in a table and a sentence, when it ends. Imports no torch.

One setting is the treatment: the cell if it varies, else what varies first. Its levels are compared
with the first one (cosine) seed by seed, within each combination of the other settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from offsphere.run.config import settings
from offsphere.study.made import metrics_of
from offsphere.study.plan import Run, Study

if TYPE_CHECKING:
    from offsphere.analysis.stats import OverSeeds

REFERENCE = "cosine"
ALPHA = 0.05
Facts = dict[str, Any]
Values = dict[int, float]
"""The metric by seed."""


class Compared(NamedTuple):
    """One level of the treatment in one context, and how it differs from the reference there."""

    context: str
    level: str
    values: Values
    against: str = ""
    difference: OverSeeds | None = None


def answer(study: Study, runs: Sequence[Run]) -> Iterator[str]:
    """Lines: means and paired differences with intervals, then what can be said."""
    if study.metric is None:
        yield "The study's file names no `metric:`, so nothing is compared here."
        return
    rows = compared(study, runs)
    if not rows:
        yield f"No finished run has {study.metric}."
        return
    yield f"{study.metric}: mean [95 % interval], and the paired difference"
    yield from _aligned([_cells(row) for row in rows])
    yield sentence(study.metric, rows)


def compared(study: Study, runs: Sequence[Run]) -> list[Compared]:
    """Every level in every context, in the plan's order."""
    measured = [
        (run, facts, float(value))
        for run, facts in zip(runs, _facts(study, runs), strict=True)
        if isinstance(value := metrics_of(run.path).get(study.metric or ""), int | float)
        and math.isfinite(value)
    ]
    names = list(measured[0][1]) if measured else []
    if "cell" in names:
        return _compared(measured, "cell")
    order = [name for name in ("arm", *names) if name in names and name != "script"]
    tried = [_compared(measured, name) for name in order or [""]]
    return max(tried, key=lambda rows: sum(row.difference is not None for row in rows))


def _compared(measured: Sequence[tuple[Run, Facts, float]], treatment: str) -> list[Compared]:
    from offsphere.analysis.stats import paired_difference

    groups: dict[str, dict[str, Values]] = {}
    for run, facts, value in measured:
        own = dict(facts)
        level = str(own.pop(treatment, ""))
        level = level if treatment in ("cell", "arm", "") else f"{treatment} {level}"
        context = ", ".join(f"{name} {value}" for name, value in own.items() if value is not None)
        if run.config.seed in groups.get(context, {}).get(level, {}):  # told apart by its name only
            context = f"{context}, {run.path.name}"
        groups.setdefault(context, {}).setdefault(level, {})[run.config.seed] = value
    rows = []
    for context, levels in groups.items():
        first = REFERENCE if REFERENCE in levels else next(iter(levels))
        for level in (first, *(level for level in levels if level != first)):
            both = sorted(levels[level].keys() & levels[first].keys())
            if level == first or len(both) < 2:
                rows.append(Compared(context, level, levels[level]))
                continue
            pairs = ([levels[one][seed] for seed in both] for one in (level, first))
            difference = paired_difference(*map(_array, pairs))
            rows.append(Compared(context, level, levels[level], first, difference))
    return rows


def sentence(metric: str, rows: Sequence[Compared]) -> str:
    """Which level differs most surely, or how many seeds it would take to tell."""
    from offsphere.analysis.power import seeds_for_difference
    from offsphere.analysis.stats import holm

    told = [(row, row.difference) for row in rows if row.difference is not None]
    if not told:
        return "Nothing can be compared yet: give every level at least 2 seeds in common."
    adjusted = holm([difference.p for _, difference in told])
    best = min(range(len(told)), key=lambda i: (adjusted[i], -abs(told[i][1].value)))
    row, difference = told[best]
    where = f" at {row.context}" if row.context else ""
    figures = f"{_interval(difference)}, {difference.n} seeds"
    family = f" of {len(told)} comparisons (Holm)" if len(told) > 1 else ""
    if adjusted[best] < ALPHA:
        side = "above" if difference.value > 0 else "below"
        shown = sum(p < ALPHA for p in adjusted)
        return (
            f"{row.level} is {side} {row.against} in {metric}{where}: {figures}, p = "
            f"{adjusted[best]:.2g}{family}; {shown} of {len(told)} can be told from 0."
        )
    said = f"No difference in {metric} can be told from 0{family}: the nearest is {row.level} - "
    said += f"{row.against}{where}, {figures}"
    if difference.sd == 0 or difference.value == 0:
        return f"{said}."
    needed = seeds_for_difference(difference.sd, difference.value, alpha=ALPHA / len(told))
    if needed is None:
        return f"{said}; not even 1000 seeds would show one of that size."
    more = max(needed - difference.n, 1)
    return f"{said}; if it is of that size, about {more} more seeds would show it (80 % power)."


def _facts(study: Study, runs: Sequence[Run]) -> list[Facts]:
    """What tells the conditions of a study apart, run by run: script, arm, settings that vary.

    What was tuned follows from the rest, and so does a setting that an arm decides.
    """
    facts: list[Facts] = []
    for run in runs:
        arms = dict.fromkeys(label["arm"] for label in run.labels if "arm" in label)
        named = {"script": run.name, "arm": " and ".join(arms) or None}
        left_out = {"seed", *_tuned(study, run)}
        facts.append(named | {k: v for k, v in settings(run.config).items() if k not in left_out})
    vary = _varying(facts)
    by_arm = {name for name in vary - {"arm", "cell"} if "arm" in vary and _follows(name, facts)}
    names = dict.fromkeys(name for one in facts for name in one if name in vary - by_arm)
    return [{name: one.get(name) for name in names} for one in facts]


def _tuned(study: Study, run: Run) -> AbstractSet[str]:
    """The settings that were tuned in every part that asked for a run."""
    asked = [
        part.tune
        for part in study.parts
        if any(point.labels in run.labels for point in part.points)
    ]
    sets = [{k for one in tune.candidates for k in one} if tune else set() for tune in asked]
    return set.intersection(*sets) if sets else set()


def _varying(facts: Sequence[Facts]) -> AbstractSet[str]:
    names = {name for one in facts for name in one}
    return {name for name in names if len({repr(one.get(name)) for one in facts}) > 1}


def _follows(name: str, facts: Sequence[Facts]) -> bool:
    """Whether a setting has one value in each arm."""
    pairs = {(one["arm"], repr(one.get(name))) for one in facts}
    return len(pairs) == len({arm for arm, _ in pairs})


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.array(values)


def _cells(row: Compared) -> tuple[str, ...]:
    from offsphere.analysis.stats import estimate

    values = list(row.values.values())
    mean = f"{sum(values) / len(values):.4g}"
    if len(values) > 1:
        mean = _interval(estimate(_array(values)), sign="")
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
    difference = "" if row.difference is None else f"- {row.against}: {_interval(row.difference)}"
    return row.context, row.level, mean, seeds, difference


def _interval(found: OverSeeds, sign: str = "+") -> str:
    if not math.isfinite(found.high - found.low):
        return f"{found.value:{sign}.4g} in every seed"
    return f"{found.value:{sign}.4g} [{found.low:{sign}.4g}, {found.high:{sign}.4g}]"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield "  ".join(cells).rstrip()
