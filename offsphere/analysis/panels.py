"""The runs of one part of a study that may be compared, as plain values for page and tables.

In a panel one setting is the treatment (the cell, if it varies); every combination of the other
settings that vary is a context, and levels of the treatment are compared inside a context only,
seed by seed. No torch.

Why inside a context: another batch size may move a score by more than another cell does, and a
level that happens to have more runs at the better one would win by that. Why seed by seed: runs of
one seed share weights, order and augmentation, and what these do to both drops out of their
difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from offsphere.analysis.conditions import (
    TREATMENTS,
    AtFloor,
    Condition,
    Frame,
    Steps,
    at_floor,
    corner_of,
    plain_name,
    read_steps,
    text_of,
    varying_settings,
)
from offsphere.analysis.readings import (
    Curve,
    HeatMap,
    Histogram,
    Metric,
    choose_metrics,
    read_crossed,
    read_curves,
    read_delta_cv,
    read_heat_maps,
    read_histograms,
    read_metric,
)
from offsphere.analysis.tasks import Reference, Tasks, published_variance, role_of
from offsphere.estimate import Estimate
from offsphere.names import CELLS
from offsphere.run.scripts import Role

if TYPE_CHECKING:
    import pandas as pd
    from numpy import ndarray as Array

BASELINES = ("cosine", "0", "false", "plain", "neither")
MOST_METRICS = 24
ALONG = ("batch_size", "temperature", "variance_weight")


class Along(NamedTuple):
    """Contexts in the order of a number that they differ in, such as the batch size."""

    factor: str
    groups: list[tuple[str, list[tuple[float, int]]]]
    """What else the contexts of a group share, and (number, context or level) of each member."""
    of_levels: bool
    """Whether the number is the treatment itself, so that the members are levels."""


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
        """The place (number in `conditions`) of a context and level, if it has runs."""
        places = {(c.context, c.level): i for i, c in enumerate(self.conditions)}
        return places.get((context, level))


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


def file_name(panel: Panel, place: int) -> str:
    """A name for a part's files that no other part has and no text of a run can lead elsewhere."""
    return f"{place + 1}-{plain_name(panel.name or panel.script)}"
