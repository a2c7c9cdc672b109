"""What the runs of one part of a study say, as plain values for page, figures and tables.

In a panel one setting is the treatment (the cell, if it varies); every combination of the other
settings that vary is a context, and levels of the treatment are compared inside a context only,
seed by seed. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import special

from offsphere.analysis.measuring import SAME_MEAN
from offsphere.analysis.power import smallest_difference
from offsphere.analysis.stats import OverSeeds, crossed, estimate, two_by_two
from offsphere.analysis.tables import AtFloor, at_floor
from offsphere.analysis.tasks import Reference, Tasks, outcomes_of, published_variance, role_of
from offsphere.estimate import Estimate
from offsphere.names import CELLS, CORNERS, SQUARE, parse_cell
from offsphere.run.scripts import Role

if TYPE_CHECKING:
    import pandas as pd
    from numpy import ndarray as Array

# What says which run it is, where it ran and how it ended; a change of these is no treatment.
BOOKKEEPING = frozenset(
    (
        *("run", "part", "status", "reason", "script", "commit", "dirty", "data_hash", "seed"),
        *("study", "out", "device", "workers", "checkpoint_every", "resume", "loggers", "progress"),
        *("download", "root", "data_root", "cache", "allow_pipe", "save_views", "save_embeddings"),
        *("devices", "nodes", "similarities", "reader", "reader_passages"),
    )
)
TREATMENTS = ("cell", "variance_weight", "within_view", "arm")
BASELINES = ("cosine", "0", "false", "plain", "neither")
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
MOST_METRICS = 32
MOST_CURVES = 11
CURVE_POINTS = 40
QUERY_CV = "test/norm_query_cv"
BINS = 40
WIDE_RANGE = 8.0
"""Norms whose largest is more than this many times their smallest get logarithmic bins."""
SCORED = re.compile(r"^(test/.+)_scored_(.+)$|^(test/knn_embedding)_(cosine|dot)$")
ALONG = ("batch_size", "temperature", "variance_weight")
LONGEST_NAME = 80


@dataclass(frozen=True)
class Condition:
    """One level of the treatment in one context, and its runs."""

    context: int
    level: int
    runs: tuple[str, ...]


Steps = tuple[int, int] | None


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
    """With which its largest value has four significant digits."""
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


class Along(NamedTuple):
    """Contexts in the order of a number that they differ in, such as the batch size."""

    factor: str
    groups: list[tuple[str, list[tuple[float, int]]]]
    """What else the contexts of a group share, and (number, context or level) of each member."""
    of_levels: bool
    """The number is the treatment itself: the members are levels."""


@dataclass(frozen=True)
class Panel:
    """The runs of a study that may be compared with each other."""

    name: str
    script: str
    treatment: str | None
    levels: list[str]
    baseline: int | None
    contexts: list[str]
    roles: list[Role]
    conditions: list[Condition]
    seeds: list[int]
    primary: str | None
    metrics: dict[str, Metric]
    curves: dict[str, list[Curve]]
    curves_over: str
    histograms: list[Histogram]
    heat_maps: list[HeatMap]
    along: Along | None
    reference: list[Reference]
    at_floor: list[AtFloor]
    """Per condition."""
    steps: list[Steps]
    """Per condition the fewest and the most optimiser steps of its runs."""
    delta_cv: dict[int, Estimate]
    """By context, in retrieval: the variation of the queries' norms under dnorm over that under
    dot (the paper's Delta-CV), seed by seed."""

    def corner(self, level: int) -> str | None:
        """The cell that a level is, if the treatment is the cell."""
        return corner_of(self.levels[level]) if self.treatment == "cell" else None

    def condition(self, context: int, level: int) -> int | None:
        """The place of a condition, if it has runs."""
        places = {(c.context, c.level): i for i, c in enumerate(self.conditions)}
        return places.get((context, level))


class Frame(NamedTuple):
    """The conditions of a panel and the runs' table they point to."""

    conditions: list[Condition]
    levels: list[str]
    treatment: str | None
    baseline: int | None
    seeds: list[int]
    runs: pd.DataFrame
    contexts: int

    def values(self, column: str) -> Array:
        """Conditions x seeds; the mean where a seed has several runs, NaN where it has none."""
        found = np.full((len(self.conditions), len(self.seeds)), np.nan)
        place = {seed: i for i, seed in enumerate(self.seeds)}
        seeds, measured = self.runs["seed"].to_dict(), self.runs[column].astype(float).to_dict()
        for row, condition in enumerate(self.conditions):
            by_seed: dict[int, list[float]] = {}
            for run in condition.runs:
                if not math.isnan(measured[run]):
                    by_seed.setdefault(place[int(seeds[run])], []).append(measured[run])
            for column_place, values in by_seed.items():
                found[row, column_place] = float(np.mean(values))
        return found

    def baseline_of(self, condition: Condition) -> int | None:
        """The place of the baseline's condition in the same context."""
        for place, other in enumerate(self.conditions):
            if (other.context, other.level) == (condition.context, self.baseline):
                return place
        return None


def read_panel(
    name: str,
    script: str,
    tasks: Tasks,
    runs: pd.DataFrame,
    metric: str | None,
    claimed: Sequence[str],
    curves: pd.DataFrame,
    examples: Mapping[str, Mapping[str, Array]],
) -> Panel:
    """One part of a study: its conditions and what was measured in each."""
    factors = varying_settings(runs)
    treatment = next((f for f in TREATMENTS if f in factors), factors[0] if factors else None)
    others = [factor for factor in factors if factor != treatment]
    levels = _levels(runs, treatment)
    keys = _combinations(runs, others)
    contexts = [_context_name(others, key) for key in keys]
    context_of = [keys.index(key) for key in _keys(runs, others)]
    level_of = [levels.index(x) for x in runs[treatment].map(text_of)] if treatment else None
    members: dict[tuple[int, int], list[str]] = {}
    for place, run in enumerate(runs["run"]):
        pair = (context_of[place], level_of[place] if level_of else 0)
        members.setdefault(pair, []).append(run)
    conditions = [
        Condition(context, level, tuple(dict.fromkeys(found)))
        for (context, level), found in sorted(members.items())
    ]
    named = next((i for i, x in enumerate(levels) if x in BASELINES), 0)
    once = runs.drop_duplicates("run").set_index("run")
    first = [
        once.loc[next(c.runs[0] for c in conditions if c.context == i)] for i in range(len(keys))
    ]
    seeds = sorted({int(x) for x in once["seed"].dropna()})
    frame = Frame(
        conditions, levels, treatment, named if treatment else None, seeds, once, len(contexts)
    )
    along = _along(others, keys, treatment, levels)
    by_batch = along is not None and (along.factor, treatment) == ("batch_size", "variance_weight")
    losses = {text_of(x) for x in runs["loss"]} if "loss" in runs.columns else set()
    primary = tasks[script].metric if script in tasks else None
    chosen = choose_metrics(runs, metric or primary, claimed)
    if treatment is not None:
        chosen = chosen[:MOST_METRICS]
    over, drawn = read_curves(frame, curves)
    metrics = {each: read_metric(frame, each) for each in chosen}
    for each in chosen if treatment is not None else []:
        if (both := read_crossed(frame, metrics[each], examples)) is not None:
            metrics[each] = replace(metrics[each], crossed=both)
            break
    return Panel(
        name=name,
        script=script,
        treatment=treatment,
        levels=levels,
        baseline=frame.baseline,
        contexts=contexts,
        roles=[role_of(tasks, script, settings) for settings in first],
        conditions=conditions,
        seeds=seeds,
        primary=chosen[0] if chosen else None,
        metrics=metrics,
        curves=drawn,
        curves_over=over,
        histograms=read_histograms(frame, examples),
        heat_maps=read_heat_maps(frame),
        along=along,
        reference=published_variance() if by_batch and losses == {"nt_xent"} else [],
        delta_cv=read_delta_cv(frame),
        at_floor=[at_floor(runs, c.runs, chosen[0] if chosen else "") for c in conditions],
        steps=[read_steps(once, c.runs) for c in conditions],
    )


def read_steps(runs: pd.DataFrame, names: Sequence[str]) -> Steps:
    """The fewest and the most optimiser steps of these runs, None where no run says."""
    if "run/steps" not in runs.columns:
        return None
    found = numbers(runs.loc[list(names), "run/steps"])
    found = found[np.isfinite(found)]
    return (int(found.min()), int(found.max())) if len(found) else None


def all_steps(steps: Iterable[Steps]) -> Steps:
    """The fewest and the most steps of several conditions."""
    known = [pair for pair in steps if pair is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def steps_text(steps: Steps) -> str:
    """How many optimiser steps figures come from, in words; nothing where no run says."""
    if steps is None:
        return ""
    fewest, most = steps
    return f"{fewest:,} steps" if fewest == most else f"{fewest:,} to {most:,} steps"


def parts_of(runs: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    """The rows of a study by part and script, in the order of the table."""
    parts = runs["part"] if "part" in runs.columns else [None] * len(runs)
    names = ["" if text_of(part) == "none" else str(part) for part in parts]
    keys = list(zip(names, map(text_of, runs["script"]), strict=True))
    found = [(key, runs.loc[[other == key for other in keys]]) for key in dict.fromkeys(keys)]
    scripts = [name for (name, _), _ in found]
    if len(found) > 1 and not any(scripts):
        found = [((script, script), part) for (_, script), part in found]
    return found


def varying_settings(runs: pd.DataFrame) -> list[str]:
    """The settings that differ between runs; one that follows from earlier ones is left out."""
    settings = [c for c in runs.columns if "/" not in c and c not in BOOKKEEPING]
    spelt = {c: [text_of(x) for x in runs[c]] for c in settings}
    varying = [c for c in settings if len(set(spelt[c])) > 1]
    first = [c for c in ("arm", *TREATMENTS) if c in varying]
    kept: list[str] = []
    for column in dict.fromkeys([*first, *varying]):
        groups: dict[tuple[str, ...], set[str]] = {}
        for place, value in enumerate(spelt[column]):
            groups.setdefault(tuple(spelt[k][place] for k in kept), set()).add(value)
        if any(len(values) > 1 for values in groups.values()):
            kept.append(column)
    return kept


def choose_metrics(runs: pd.DataFrame, primary: str | None, claimed: Sequence[str]) -> list[str]:
    """The metrics that can be chosen on the page, the study's own first."""
    measured = [
        c
        for c in runs.columns
        if "/" in c and not c.startswith("run/") and _is_number(runs.loc[:, c])
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
        difference.append(measure(paired))
        sizes.append(found.effect_size if found else None)
        seen = found is not None and found.sd > 0
        smallest.append(found.sd * _unit_difference(found.n) if found and seen else None)
    summary = [measure(row) for row in values]
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


def measure(values: Array) -> Estimate:
    """The mean of the values that are there, with a 95 % t-interval if there are two or more."""
    seen = values[np.isfinite(values)]
    found = _estimate(seen)
    if found is not None:
        return Estimate(found.value, found.low, found.high, found.n)
    return Estimate(float(seen[0]) if len(seen) else math.nan, math.nan, math.nan, len(seen))


def measures(values: Array) -> list[Estimate]:
    """`measure` of every column of runs x steps; no interval where the runs do not differ."""
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
            drawn[name].append(Curve(place, x, measures(values)))
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
        if (match := SCORED.match(column)) and _is_number(frame.runs.loc[:, column]):
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
                condition.level: [measure(values[group[0]][place]) for group in groups]
                for place, condition in enumerate(frame.conditions)
                if condition.context == context
            }
            if any(found.n for row in rows.values() for found in row):
                maps.append(HeatMap(base, context, groups, query, rows))
    return maps


def read_delta_cv(frame: Frame) -> dict[int, Estimate]:
    """The geometric mean of the paired ratios, with the t-interval of their logarithms."""
    if frame.treatment != "cell" or QUERY_CV not in frame.runs.columns:
        return {}
    values = frame.values(QUERY_CV)
    found = {}
    for context in range(frame.contexts):
        rows = {
            corner_of(frame.levels[condition.level]): values[place]
            for place, condition in enumerate(frame.conditions)
            if condition.context == context
        }
        if "dnorm" in rows and "dot" in rows:
            ratios = measure(np.log(rows["dnorm"]) - np.log(rows["dot"]))
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


def file_name(panel: Panel, place: int) -> str:
    """A name for a part's files that no other part has and no text of a run can lead elsewhere."""
    return f"{place + 1}-{plain_name(panel.name or panel.script)}"


def plain_name(name: str) -> str:
    """A text as the name of a file or a folder, in which no sign leads elsewhere."""
    return "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in name)[:LONGEST_NAME]


def is_norm(outcome: str) -> bool:
    """Whether a per-example outcome is a vector's norm."""
    return outcome.split("/")[-1].split("_")[0] == "norm"


def corner_of(cell: str) -> str | None:
    """The plain name of a cell, whatever the lane calls it; None for a pair of exponents."""
    try:
        parsed = parse_cell(cell)
    except ValueError:
        return None
    return parsed if isinstance(parsed, str) else None


def text_of(value: Any) -> str:
    """A setting's value as it is written in a study file."""
    import pandas as pd

    if isinstance(value, list | tuple):
        return ", ".join(text_of(item) for item in value) or "none"
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "none"
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float | np.floating):
        return f"{value:g}"
    return str(value)


def numbers(series: pd.Series) -> Array:
    """A column as floats, missing as NaN."""
    return series.to_numpy(dtype=float, na_value=np.nan)


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


def _levels(runs: pd.DataFrame, treatment: str | None) -> list[str]:
    if treatment is None:
        return ["all runs"]
    seen = list(dict.fromkeys(runs[treatment].map(text_of)))
    if treatment == "cell":
        rank = {name: place for place, name in enumerate(CELLS)}
        return sorted(seen, key=lambda name: rank.get(corner_of(name) or "", len(rank)))
    return _ordered(seen)


def _ordered(texts: list[str]) -> list[str]:
    """Numbers by size, anything else as it came."""
    try:
        return sorted(texts, key=float)
    except ValueError:
        return texts


def _keys(runs: pd.DataFrame, factors: Sequence[str]) -> list[tuple[str, ...]]:
    columns = [[text_of(x) for x in runs[factor]] for factor in factors]
    return list(zip(*columns, strict=True)) if columns else [()] * len(runs)


def _combinations(runs: pd.DataFrame, factors: Sequence[str]) -> list[tuple[str, ...]]:
    """The combinations of settings that occur, in the order of their values."""
    orders = [_ordered(list(dict.fromkeys(text_of(x) for x in runs[f]))) for f in factors]
    return sorted(
        set(_keys(runs, factors)),
        key=lambda key: [order.index(x) for order, x in zip(orders, key, strict=True)],
    )


def _context_name(factors: Sequence[str], key: Sequence[str]) -> str:
    pairs = zip(factors, key, strict=True)
    return ", ".join(value if f == "arm" else f"{f} {value}" for f, value in pairs)


def _along(
    others: Sequence[str],
    keys: Sequence[tuple[str, ...]],
    treatment: str | None,
    levels: Sequence[str],
) -> Along | None:
    """The number to draw results against, if the contexts or the levels differ in one."""
    factor = next((f for f in ALONG if f in others), None)
    if factor is not None:
        column = others.index(factor)
        rest = [*others[:column], *others[column + 1 :]]
        groups: dict[str, list[tuple[float, int]]] = {}
        for context, key in enumerate(keys):
            shared = _context_name(rest, [*key[:column], *key[column + 1 :]])
            if (number := _as_number(key[column])) is not None:
                groups.setdefault(shared, []).append((number, context))
        kept = [(name, sorted(members)) for name, members in groups.items() if len(members) > 1]
        return Along(factor, kept, False) if kept else None
    values = [_as_number(level) for level in levels]
    if treatment is None or len(levels) < 3 or any(value is None for value in values):
        return None
    members = sorted((v, level) for level, v in enumerate(values) if v is not None)
    names = [_context_name(others, key) for key in keys]
    return Along(treatment, [(name, members) for name in names], True)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _squares(frame: Frame, values: Array) -> dict[int, Square]:
    if frame.treatment != "cell":
        return {}
    squares = {}
    for context in range(frame.contexts):
        found = {
            corner_of(frame.levels[condition.level]): values[place]
            for place, condition in enumerate(frame.conditions)
            if condition.context == context
        }
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


def _is_number(series: pd.Series) -> bool:
    import pandas as pd

    numeric = pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series)
    return bool(numeric and np.isfinite(numbers(series)).any())
