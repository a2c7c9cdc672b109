"""What was measured in the conditions of a panel: metrics, curves, norms, scores. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import special

from offsphere.analysis.conditions import Condition, Frame, corner_of, is_number, text_of
from offsphere.analysis.measuring import SAME_MEAN
from offsphere.analysis.power import smallest_difference
from offsphere.analysis.stats import OverSeeds, crossed, estimate, two_by_two
from offsphere.analysis.tasks import outcomes_of
from offsphere.estimate import Estimate
from offsphere.names import CELLS, CORNERS, SQUARE

if TYPE_CHECKING:
    import pandas as pd
    from numpy import ndarray as Array

TRAINING_METRICS = (
    "train/loss",
    "train/negative_variance",
    "train/negative_mean",
    "train/alignment",
    "train/uniformity",
    "train/rankme",
    "train/norm_left_mean",
    "train/norm_right_mean",
    "train/norm_left_cv",
    "train/norm_right_cv",
    "train/temperature",
    "train/exponent_left",
    "train/exponent_right",
)
EXPONENTS = ("train/exponent_left", "train/exponent_right")
CURVES = ("test/", *EXPONENTS, "train/loss", "train/contrastive", *TRAINING_METRICS[1:10])
MOST_CURVES = 11
CURVE_POINTS = 12
QUERY_CV = "test/norm_query_cv"
BINS = 40
WIDE_RANGE = 8.0
"""If the largest norm is more than this many times the smallest one, bins are logarithmic."""
SCORED = re.compile(r"^(test/.+)_scored_(.+)$|^(test/knn_embedding)_(cosine|dot)$")


class Square(NamedTuple):
    """What discarding each side's norm does; seeds that lack a corner are left out."""

    left: Estimate
    right: Estimate
    interaction: Estimate


@dataclass(frozen=True)
class Metric:
    """One metric of every condition of a panel, in the order of its conditions."""

    name: str
    decimals: int
    """How many decimals give its largest value four significant digits."""
    summary: list[Estimate]
    missing: list[int]
    values: list[list[float]]
    """Per condition one value per seed of the panel; NaN where there is none."""
    difference: list[Estimate | None]
    """Paired difference to the baseline of the same context."""
    effect_size: list[float | None]
    smallest: list[float | None]
    """The difference that this many seeds see with 80 % power."""
    squares: dict[int, Square]
    """By context, where all four corner cells are there."""
    crossed: list[OverSeeds | None] | None = None
    """The difference with an interval over seeds and examples, where outcomes were kept."""


@dataclass(frozen=True)
class Curve:
    """One number over training, over the seeds of a condition."""

    condition: int
    x: list[float]
    points: list[Estimate]


@dataclass(frozen=True)
class Histogram:
    """How the norms of a context's examples spread, pooled over seeds, by level."""

    outcome: str
    context: int
    edges: list[float]
    shares: dict[int, list[float]]
    logarithmic: bool
    variation: dict[int, float]
    """Coefficient of variation inside a run, mean over runs."""


@dataclass(frozen=True)
class HeatMap:
    """One metric by the cell in training (rows) and the cell in scoring (columns)."""

    metric: str
    context: int
    columns: list[tuple[str, ...]]
    """Cells that tie by construction share a column."""
    query: str | None
    """The side whose norm changes nothing, if columns tie."""
    rows: dict[int, list[Estimate]]


def choose_metrics(runs: pd.DataFrame, primary: str | None, claimed: Sequence[str]) -> list[str]:
    """The metrics that can be chosen on the page, the study's own first."""
    measured = [
        c
        for c in runs.columns
        if "/" in c and not c.startswith("run/") and is_number(runs.loc[:, c])
    ]
    tests = [c for c in measured if c.startswith("test/") and not SCORED.match(c)]
    others = [c for c in measured if c.split("/")[0] not in ("test", "train", "untrained")]
    wanted = [primary, *claimed, *tests, *TRAINING_METRICS, *others]
    return [c for c in dict.fromkeys(wanted) if c in measured]


def read_metric(frame: Frame, name: str) -> Metric:
    """A metric's means, intervals, paired differences and squares."""
    values = frame.values(name)
    values[~np.isfinite(values)] = np.nan
    difference: list[Estimate | None] = []
    sizes: list[float | None] = []
    smallest: list[float | None] = []
    for row, condition in enumerate(frame.conditions):
        base = frame.baseline_of(condition)
        if base is None or base == row:
            difference.append(None)
            sizes.append(None)
            smallest.append(None)
            continue
        paired = values[row] - values[base]
        found = _estimate(paired)
        difference.append(mean_of(paired))
        sizes.append(found.effect_size if found else None)
        seen = found is not None and found.sd > 0
        smallest.append(found.sd * _unit_difference(found.n) if found and seen else None)
    summary = [mean_of(row) for row in values]
    runs = [len(condition.runs) for condition in frame.conditions]
    return Metric(
        name=name,
        decimals=decimals_for([x.value for x in summary]),
        summary=summary,
        missing=[max(total - found.n, 0) for total, found in zip(runs, summary, strict=True)],
        values=values.tolist(),
        difference=difference,
        effect_size=sizes,
        smallest=smallest,
        squares=_squares(frame, values),
    )


def read_crossed(
    frame: Frame, metric: Metric, examples: Mapping[str, Mapping[str, Array]]
) -> list[OverSeeds | None] | None:
    """Each paired difference over seeds and examples; None if no outcome has the metric's mean."""
    outcomes = outcomes_of(metric.name)
    rows = [_outcome_rows(frame, condition, outcomes, examples) for condition in frame.conditions]
    size = next((x.shape[1] for x in rows if x is not None), 0)
    found: list[OverSeeds | None] = []
    for place, condition in enumerate(frame.conditions):
        base = frame.baseline_of(condition)
        treated, control = rows[place], None if base is None else rows[base]
        if base is None or base == place or treated is None or control is None:
            found.append(None)
            continue
        pairs = ((treated, metric.values[place]), (control, metric.values[base]))
        same_data = treated.shape == control.shape == (len(frame.seeds), size)
        if not same_data or not all(_is_mean(x, np.array(values)) for x, values in pairs):
            return None
        whole = int((~np.isnan(treated - control)).all(axis=1).sum())
        enough = whole > 1 and size > 1
        found.append(crossed([treated - control]) if enough else None)
    return found if any(x is not None for x in found) else None


def mean_of(values: Array) -> Estimate:
    """The mean of the values that are there, with a 95 % t-interval if there are two or more."""
    seen = values[np.isfinite(values)]
    found = _estimate(seen)
    if found is not None:
        return Estimate(found.value, found.low, found.high, found.n)
    return Estimate(float(seen[0]) if len(seen) else math.nan, math.nan, math.nan, len(seen))


def means_of(values: Array) -> list[Estimate]:
    """`mean_of` of every column of runs x steps; no interval where the runs do not differ."""
    there = np.isfinite(values)
    n = there.sum(axis=0)
    mean = np.where(there, values, 0.0).sum(axis=0) / np.maximum(n, 1)
    squares = np.where(there, values - mean, 0.0) ** 2
    error = np.sqrt(squares.sum(axis=0) / np.maximum(n - 1, 1) / np.maximum(n, 1))
    reach = special.stdtrit(np.maximum(n - 1, 1), 0.975) * error
    reach = np.where((n > 1) & (error > 0), reach, np.nan)
    mean = np.where(n > 0, mean, np.nan)
    columns = (mean.tolist(), (mean - reach).tolist(), (mean + reach).tolist(), n.tolist())
    return [Estimate(*column) for column in zip(*columns, strict=True)]


def decimals_for(values: Iterable[float]) -> int:
    """How many decimals show the largest of the values with four significant digits."""
    sizes = [abs(value) for value in values if math.isfinite(value) and value]
    return min(max(3 - math.floor(math.log10(max(sizes))), 0), 9) if sizes else 3


def read_curves(frame: Frame, curves: pd.DataFrame) -> tuple[str, dict[str, list[Curve]]]:
    """(what the curves run over, curves by name): mean and interval over the finished runs."""
    names = [
        name
        for wanted in CURVES
        for name in sorted(set(curves["name"]))
        if name == wanted or (wanted == "test/" and name.startswith("test/"))
    ]
    cells = frame.runs["cell"] if "cell" in frame.runs.columns else []
    if not any(corner_of(text_of(cell)) == "learnable" for cell in cells):
        names = [name for name in names if name not in EXPONENTS]
    names = list(dict.fromkeys(names))[:MOST_CURVES]
    of_names = curves[curves["name"].isin([*names, "samples"])]
    by_run = dict(iter(of_names.groupby("run", sort=False)))
    drawn: dict[str, list[Curve]] = {name: [] for name in names}
    over = "samples" if "samples" in set(curves["name"]) else "step"
    for place, condition in enumerate(frame.conditions):
        finished = [run for run in condition.runs if frame.runs.at[run, "status"] == "finished"]
        parts = [by_run[run] for run in finished if run in by_run]
        tables = [part.pivot_table(index="step", columns="name", values="value") for part in parts]
        for name in names:
            lines = [table[name].dropna() for table in tables if name in table.columns]
            if not lines:
                continue
            steps = _thinned(sorted(set().union(*(line.index for line in lines))))
            seen = tables[0].get("samples")
            x = [float(s if seen is None else seen.get(s, s)) for s in steps]
            values = np.stack([line.reindex(steps).to_numpy(float) for line in lines])
            drawn[name].append(Curve(place, x, means_of(values)))
    return over, {name: lines for name, lines in drawn.items() if lines}


def read_histograms(frame: Frame, examples: Mapping[str, Mapping[str, Array]]) -> list[Histogram]:
    """Histograms with common bins per kind of norm and context."""
    members = {run for condition in frame.conditions for run in condition.runs}
    norms = {
        run: {name: x for name, x in examples.get(run, {}).items() if is_norm(name)}
        for run in members
    }
    outcomes = sorted({name for found in norms.values() for name in found})
    found = []
    for outcome in outcomes:
        for context in range(frame.contexts):
            by_level = {
                condition.level: [
                    norms[run][outcome][np.isfinite(norms[run][outcome])]
                    for run in condition.runs
                    if outcome in norms.get(run, {})
                ]
                for condition in frame.conditions
                if condition.context == context
            }
            by_level = {level: parts for level, parts in by_level.items() if any(map(len, parts))}
            if by_level:
                found.append(_histogram(outcome, context, by_level))
    return found


def read_heat_maps(frame: Frame) -> list[HeatMap]:
    """Trained-with by scored-with, for every metric that was scored with several cells."""
    if frame.treatment != "cell":
        return []
    columns: dict[str, dict[str, str]] = {}
    for column in frame.runs.columns:
        if (match := SCORED.match(column)) and is_number(frame.runs.loc[:, column]):
            base, cell = (match[1], match[2]) if match[1] else (match[3], match[4])
            columns.setdefault(base, {})[cell] = column
    maps = []
    for base, cells in columns.items():
        values = {cell: frame.values(column) for cell, column in cells.items()}
        if len(values) < 2:
            continue
        groups, query = tied_columns(values)
        for context in range(frame.contexts):
            rows = {
                condition.level: [mean_of(values[group[0]][place]) for group in groups]
                for place, condition in enumerate(frame.conditions)
                if condition.context == context
            }
            if any(found.n for row in rows.values() for found in row):
                maps.append(HeatMap(base, context, groups, query, rows))
    return maps


def _by_cell(frame: Frame, values: Array, context: int) -> dict[str | None, Array]:
    """The values over seeds of each corner cell in one context; None is the key of other cells."""
    return {
        corner_of(frame.levels[condition.level]): values[place]
        for place, condition in enumerate(frame.conditions)
        if condition.context == context
    }


def read_delta_cv(frame: Frame) -> dict[int, Estimate]:
    """The geometric mean of the paired ratios, with the t-interval of their logarithms."""
    if frame.treatment != "cell" or QUERY_CV not in frame.runs.columns:
        return {}
    values = frame.values(QUERY_CV)
    found = {}
    for context in range(frame.contexts):
        rows = _by_cell(frame, values, context)
        if "dnorm" in rows and "dot" in rows:
            ratios = mean_of(np.log(rows["dnorm"]) - np.log(rows["dot"]))
            if ratios.n:
                mean, low, high = map(math.exp, (ratios.value, ratios.low, ratios.high))
                found[context] = Estimate(mean, low, high, ratios.n)
    return found


def tied_columns(values: Mapping[str, Array]) -> tuple[list[tuple[str, ...]], str | None]:
    """Cells that gave equal values in every run and share one side's exponent; the query's side.

    Where all cells with one exponent of the candidates tie, only the candidates' norms matter.
    """
    if set(values) == set(CORNERS):
        for side, query in ((1, "left"), (0, "right")):
            groups: dict[float, list[str]] = {}
            for cell, exponents in CORNERS.items():
                groups.setdefault(exponents[side], []).append(cell)
            tied = [tuple(group) for group in groups.values()]
            same = ((values[group[0]], values[cell]) for group in tied for cell in group[1:])
            if all(np.array_equal(a, b, equal_nan=True) for a, b in same):
                return tied, query
    order = [cell for cell in CELLS if cell in values]
    return [(cell,) for cell in [*order, *(c for c in values if c not in order)]], None


def is_norm(outcome: str) -> bool:
    """Whether a per-example outcome is a vector's norm."""
    return outcome.split("/")[-1].split("_")[0] == "norm"


def _outcome_rows(
    frame: Frame,
    condition: Condition,
    outcomes: Sequence[str],
    examples: Mapping[str, Mapping[str, Array]],
) -> Array | None:
    """Seeds x examples, a row of NaN where a seed has no outcomes; None if the sizes differ."""
    by_seed: dict[int, list[Array]] = {}
    for run in condition.runs:
        kept = [examples[run][name] for name in outcomes if name in examples.get(run, {})]
        whole = len(kept) == len(outcomes) and len({len(x) for x in kept}) == 1
        if whole and np.isfinite(kept).all():
            by_seed.setdefault(int(frame.runs.at[run, "seed"]), []).append(np.mean(kept, axis=0))
    sizes = {len(x) for found in by_seed.values() for x in found}
    if len(sizes) != 1:
        return None
    missing = np.full(sizes.pop(), np.nan)
    return np.stack([np.mean(by_seed.get(seed, [missing]), axis=0) for seed in frame.seeds])


def _is_mean(rows: Array, values: Array) -> bool:
    """Whether the numbers per seed are the means of the rows, where there are both."""
    means = rows.mean(axis=1)
    both = np.isfinite(means) & np.isfinite(values)
    return bool((np.abs(means - values)[both] <= SAME_MEAN).all())


def _histogram(outcome: str, context: int, by_level: dict[int, list[Array]]) -> Histogram:
    pooled = {level: np.concatenate(parts) for level, parts in by_level.items()}
    everything = np.concatenate(list(pooled.values()))
    low, high = np.quantile(everything, [0.001, 0.999])
    logarithmic = bool(low > 0 and high / low > WIDE_RANGE)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = np.geomspace(low, high, BINS + 1) if logarithmic else np.linspace(low, high, BINS + 1)
    shares = {
        level: (np.histogram(np.clip(x, low, high), edges)[0] / len(x)).tolist()
        for level, x in pooled.items()
    }
    variation = {
        level: float(np.mean([x.std() / x.mean() for x in parts if len(x) and x.mean() > 0]))
        for level, parts in by_level.items()
        if any(len(x) and x.mean() > 0 for x in parts)
    }
    return Histogram(outcome, context, edges.tolist(), shares, logarithmic, variation)


def _squares(frame: Frame, values: Array) -> dict[int, Square]:
    if frame.treatment != "cell":
        return {}
    squares = {}
    for context in range(frame.contexts):
        found = _by_cell(frame, values, context)
        four = [found.get(name) for name in SQUARE]
        if any(row is None for row in four):
            continue
        corners = [row for row in four if row is not None]
        if int((~np.isnan(np.stack(corners)).any(axis=0)).sum()) < 2:
            continue
        effects = two_by_two(*corners)
        found_effects = (effects.left, effects.right, effects.interaction)
        squares[context] = Square(*(Estimate(e.value, e.low, e.high, e.n) for e in found_effects))
    return squares


def _estimate(values: Array) -> OverSeeds | None:
    seen = values[np.isfinite(values)]
    return estimate(seen) if len(seen) > 1 else None


@cache
def _unit_difference(n: int) -> float:
    return smallest_difference(n, 1.0)


def _thinned(steps: list[Any]) -> list[Any]:
    if len(steps) <= CURVE_POINTS:
        return steps
    places = np.unique(np.linspace(0, len(steps) - 1, CURVE_POINTS).round().astype(int))
    return [steps[place] for place in places]
