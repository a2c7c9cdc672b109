"""What a study's table says about a claim: its contrast over seeds, and over examples. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offsphere.analysis.claim_file import Claim
from offsphere.analysis.foreign import is_number
from offsphere.analysis.stats import OverSeeds, contrast, correlation, crossed
from offsphere.analysis.tables import Examples
from offsphere.analysis.tasks import outcomes_of, unit_of

if TYPE_CHECKING:
    import pandas as pd
    from numpy import ndarray as Array

SAME_MEAN = 1e-4
"""A metric counts as the mean of an outcome if in no run the two differ by more than this."""
TEST_SET = ("script", "task", "data_hash")
"""Runs that differ in one of these were judged on different examples."""
ENDED = ("finished", "failed")

Key = tuple[Any, ...]


class Unmatched(Exception):
    """A claim asks for something that the study's table does not hold."""


class Incomplete(Unmatched):
    """Too few seeds are finished in every condition."""


class Condition(NamedTuple):
    """The runs with the same levels of what a claim compares, their weight in the contrast and what
    the levels are called."""

    rows: pd.DataFrame
    weight: float
    name: str


def measure(claim: Claim, runs: pd.DataFrame, examples: Examples | None = None) -> OverSeeds:
    """The claim's contrast over a study's runs, paired by seed.

    Where the runs kept the outcome of every test example, the interval is over seeds and examples.
    """
    if claim.correlate is not None:
        return _correlation(claim, runs)
    conditions = conditions_of(claim, runs)
    values = [_values(claim, condition.rows) for condition in conditions]
    keys = sorted(set().union(*values))
    stacked = [np.array([found.get(key, math.nan) for key in keys], float) for found in values]
    complete = ~np.isnan(np.stack(stacked)).any(axis=0)
    if complete.sum() < 2:
        raise Incomplete(f"{complete.sum()} of {len(keys)} seeds complete, an interval needs 2")
    against = float(claim.against) if isinstance(claim.against, float) else 0.0
    if examples:
        parts = _example_parts(claim, conditions, keys, examples)
        if parts is not None and (~np.isnan(parts[0]).all(axis=1) == complete).all():
            return crossed([parts[0] - against, *parts[1:]])
    weights = [*(condition.weight for condition in conditions), -1.0]
    return contrast([*stacked, np.full(len(keys), against)], weights)


def ended(claim: Claim, runs: pd.DataFrame) -> int:
    """How many pairs have ended, well or not, in every condition."""
    found: set[Key] | None = None
    for condition in conditions_of(claim, runs):
        rows = condition.rows
        if "status" in rows.columns:
            rows = rows.loc[rows["status"].isin(ENDED)]
        keys = set(_keys(claim, rows))
        found = keys if found is None else found & keys
    return len(found or ())


def conditions_of(claim: Claim, runs: pd.DataFrame) -> list[Condition]:
    """The rows of each condition with the condition's weight in the contrast."""
    rows = matching(claim.where, runs)
    conditions = [Condition(rows, 1.0, "")]
    for factor in (claim.effect, claim.interaction):
        if factor is None:
            continue
        series = column_of(rows, factor.column)
        for value in (*factor.plus, *factor.minus):
            if not equals(series, value).any():
                raise Unmatched(f"no run with {factor.column}={value}")
        conditions = [
            Condition(
                condition.rows.loc[equals(column_of(condition.rows, factor.column), value)],
                condition.weight * sign,
                f"{condition.name}, {factor.column}={value}".removeprefix(", "),
            )
            for condition in conditions
            for value, sign in factor.weights()
        ]
    return conditions


def matching(where: Mapping[str, Any] | None, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows that meet the conditions; runs on validation data are for tuning, not for claims."""
    if "eval_split" in runs.columns:
        runs = runs.loc[~equals(column_of(runs, "eval_split"), "validation")]
    for column, wanted in (where or {}).items():
        series = column_of(runs, column)
        keep = np.zeros(len(runs), bool)
        for value in wanted if isinstance(wanted, list) else [wanted]:
            text = value if isinstance(value, str) else ""
            if text.startswith("not "):
                keep |= ~equals(series, text.removeprefix("not "))
            else:
                keep |= equals(series, value)
        runs = runs.loc[keep]
    if runs.empty:
        wanted = ", ".join(f"{column}={value}" for column, value in (where or {}).items())
        raise Unmatched(f"no run with {wanted or 'test data'}")
    return runs


def column_of(runs: pd.DataFrame, name: str) -> pd.Series:
    """A column that must be there."""
    if name not in runs.columns:
        raise Unmatched(f"the study's table has no column {name!r}")
    return runs.loc[:, name]


def equals(series: pd.Series, value: Any) -> np.ndarray:
    """Which cells hold a value, written as a number, as a truth value or as a string."""
    import pandas as pd

    if value is None:
        return series.isna().to_numpy(bool)
    if pd.api.types.is_bool_dtype(series):
        wanted = {"true": True, "false": False}.get(str(value).lower())
        same = series.map(lambda cell: cell is not pd.NA and bool(cell) is wanted)
    elif pd.api.types.is_numeric_dtype(series):
        try:
            same = series == float(value)
        except ValueError:
            raise Unmatched(f"the column {series.name!r} holds numbers, not {value!r}") from None
        same = same.fillna(False)
    else:
        same = series.map(lambda cell: cell is not None and str(cell) == str(value))
    return same.to_numpy(bool)


def numbers(runs: pd.DataFrame, name: str) -> Array:
    """A column as floats, missing as NaN."""
    column = column_of(runs, name)
    if not all(is_number(value) for value in column.dropna()):
        raise Unmatched(f"the column {name!r} holds no numbers")
    return column.to_numpy(dtype=float, na_value=np.nan)


def steps_of(claim: Claim, runs: pd.DataFrame) -> tuple[int, int] | None:
    """The fewest and the most optimiser steps of the runs that the claim rests on."""
    if "run/steps" not in runs.columns:
        return None
    steps = np.concatenate(
        [numbers(condition.rows, "run/steps") for condition in conditions_of(claim, runs)]
    )
    steps = steps[np.isfinite(steps)]
    return (int(steps.min()), int(steps.max())) if len(steps) else None


def _keys(claim: Claim, rows: pd.DataFrame) -> list[Key]:
    return list(zip(*(column_of(rows, column) for column in claim.by), strict=True))


def _values(claim: Claim, rows: pd.DataFrame) -> dict[Key, float]:
    """The metric per pairing key; a key with two runs is an error that names what differs."""
    rows = rows.drop_duplicates("run")
    if (gaps := [c for c in claim.by if column_of(rows, c).isna().any()]) and len(rows):
        raise Unmatched(f"a run has no {gaps[0]!r}, by which runs are paired")
    keys = _keys(claim, rows)
    if doubled := sorted({key for key in keys if keys.count(key) > 1}):
        twins = rows.loc[[key == doubled[0] for key in keys]]
        settings = [name for name in rows.columns if "/" not in name and name != "run"]
        differ = [name for name in settings if len(set(map(str, column_of(twins, name)))) > 1]
        pair = ", ".join(f"{k}={v}" for k, v in zip(claim.by, doubled[0], strict=True))
        raise Unmatched(
            f"{len(twins)} runs with {pair} differ in {', '.join(differ[:4]) or 'nothing'}: the "
            "claim's 'where' must choose"
        )
    total = np.zeros(len(rows))
    for name, sign in claim.terms:
        values = numbers(rows, name)
        if claim.transform == "log":
            if (values <= 0).any():
                raise Unmatched(f"{name} is 0 or less in a run, so it has no logarithm")
            values = np.log(values)
        total = total + sign * values
    return dict(zip(keys, total, strict=True))


def _example_parts(
    claim: Claim, conditions: Sequence[Condition], keys: Sequence[Key], examples: Examples
) -> list[Array] | None:
    """Pairs x examples of the contrast, one matrix per test set; None if an outcome is missing.

    A logarithm is taken of a run's mean m; its examples enter as log m + (x - m) / m, whose mean is
    log m and whose spread is that of the logarithm of a mean (the delta method).
    """
    parts: dict[tuple[str, ...], Array] = {}
    for condition in conditions:
        rows = condition.rows.drop_duplicates("run")
        places = [keys.index(key) for key in _keys(claim, rows)]
        for name, sign in claim.terms:
            for place, run, mean, about in zip(
                places, rows["run"], numbers(rows, name), _test_sets(rows), strict=True
            ):
                if math.isnan(mean):
                    continue
                found = outcome_of(examples.get(str(run), {}), name)
                # The kept outcomes must be what the metric is the mean of: an interval over other
                # examples would be worse than one that takes the test set as given.
                if found is None or abs(found.mean() - mean) > SAME_MEAN:
                    return None
                if claim.transform == "log":
                    found = math.log(mean) + (found - found.mean()) / mean
                test_set = (*about, str(len(found)))
                part = parts.setdefault(test_set, np.zeros((len(keys), len(found))))
                part[place] += condition.weight * sign * found
    # A seed that lacks one condition is left out of every test set, or the sum over conditions
    # would be of different seeds in different test sets.
    complete = np.ones(len(keys), bool)
    for condition in conditions:
        values = _values(claim, condition.rows)
        complete &= np.array([not math.isnan(values.get(key, math.nan)) for key in keys])
    for part in parts.values():
        part[~complete] = np.nan
    return list(parts.values()) or None


def outcome_of(kept: Mapping[str, Array], metric: str) -> Array | None:
    """Per example what a metric is the mean of, if a run kept it.

    Captions that share an image are one example: they are not independent.
    """
    names = outcomes_of(metric)
    vectors = [kept[name] for name in names if name in kept]
    if len(vectors) < len(names):
        return None
    units = [kept[name] for name in [unit_of(names[0])] if name in kept]
    size = min(map(len, [*vectors, *units]))
    if any(len(x) % size or not np.isfinite(x).all() for x in vectors):
        return None
    return np.mean([x.reshape(size, -1).mean(axis=1) for x in vectors], axis=0)


def _test_sets(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    columns = [column_of(rows, name).map(str) for name in TEST_SET if name in rows.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _correlation(claim: Claim, runs: pd.DataFrame) -> OverSeeds:
    """Fisher's z of the correlation of two metrics over collections, each a mean over the pairs.

    In the metric and in `correlate` a star stands for the collection's name. The interval is over
    collections, which are what such a claim is a sample of.
    """
    rows = matching(claim.where, runs).drop_duplicates("run")
    starred = [str(claim.correlate), *(name for name, _ in claim.terms)]
    before, after = starred[0].split("*")
    names = [c.removeprefix(before).removesuffix(after) for c in map(str, rows.columns)]
    names = [n for n in names if all(s.replace("*", n) in rows.columns for s in starred)]
    if len(names) < 4:
        raise Incomplete(f"{len(names)} collections have {' and '.join(starred)}, it takes 4")
    x = np.array([np.nanmean(numbers(rows, starred[0].replace("*", n))) for n in names])
    y = np.zeros(len(names))
    for name, sign in claim.terms:
        y += [sign * np.nanmean(numbers(rows, name.replace("*", n))) for n in names]
    found = correlation(x, y)
    z, error = math.atanh(found.value), 1 / math.sqrt(found.n - 3)
    spread, dropped = error * math.sqrt(found.n), len(names) - found.n
    found = OverSeeds(
        z, n=found.n, sd=spread, dropped=dropped, error=error, dof=1e6, unit="collection"
    )
    low, high = found.interval(0.95)
    return replace(found, low=low, high=high, p=2 * min(found.p_above(0.0), found.p_below(0.0)))
