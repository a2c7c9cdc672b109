"""What differs between the runs of a study: parts, settings, conditions. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offsphere.names import parse_cell

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
LONGEST_NAME = 80
Steps = tuple[int, int] | None


@dataclass(frozen=True)
class Condition:
    """One level of the treatment in one context, and its runs."""

    context: int
    level: int
    runs: tuple[str, ...]


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
        """The place (number in the list) of the baseline's condition in the same context."""
        for place, other in enumerate(self.conditions):
            if (other.context, other.level) == (condition.context, self.baseline):
                return place
        return None


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


def plain_name(name: str) -> str:
    """A string as the name of a file or folder: no character of it can lead to another folder."""
    return "".join(sign if sign.isalnum() or sign in "-_" else "_" for sign in name)[:LONGEST_NAME]


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


class AtFloor(NamedTuple):
    """How many runs are not above their untrained model, and how many say whether they are."""

    runs: int
    measured: int


NO_FLOOR = AtFloor(0, 0)


def at_floor(runs: pd.DataFrame, names: Collection[str], metric: str) -> AtFloor:
    """The verdict `floor` of the collection that a metric is about, over the named runs."""
    column = f"{metric.rpartition('/')[0]}/floor"
    if column not in runs.columns:
        return NO_FLOOR
    rows = runs.loc[runs["run"].isin(list(names))].drop_duplicates("run")
    found = rows[column].dropna().astype(float)
    return AtFloor(int((found > 0).sum()), len(found))


def numbers(series: pd.Series) -> Array:
    """A column as floats, missing as NaN."""
    return series.to_numpy(dtype=float, na_value=np.nan)


def is_number(series: pd.Series) -> bool:
    import pandas as pd

    numeric = pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series)
    return bool(numeric and np.isfinite(numbers(series)).any())
