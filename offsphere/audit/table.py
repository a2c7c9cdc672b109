"""The one table of an audit or a benchmark: a row per data set, direction, score and metric.

Everything that is shown (console, page, advice) is read from it, and it is what is written. What
needs no score has no `scored_with`; `chance` and `majority` stand there as scores. What is about
both sides of a data set (their norms, their gap) stands under its first direction. No torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import NamedTuple

from offsphere.estimate import Estimate

HALF = "_on_half"
"""Ends the names of metrics that are measured on the half on which nothing was fitted."""


class Row(NamedTuple):
    data: str
    direction: str
    scored_with: str
    metric: str
    value: float
    low: float
    high: float
    n: int
    """Independent examples (images with their captions, queries) behind the value."""


class Problem(NamedTuple):
    """Why something was not scored with a similarity: it could not be fitted."""

    data: str
    direction: str
    scored_with: str
    problem: str


class Table:
    """Estimates by data set, direction, score and metric, in the order in which they came."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, str], Estimate] = {}

    def add(
        self, data: str, direction: str, scored_with: str, metric: str, found: Estimate
    ) -> None:
        """One more row; a second one for the same is an error of the caller."""
        key = (data, direction, scored_with, metric)
        if key in self._found:
            raise ValueError(f"The table has two rows for {', '.join(filter(None, key))}.")
        self._found[key] = found

    def get(
        self, data: str, direction: str, scored_with: str = "", metric: str = ""
    ) -> Estimate | None:
        """The estimate, or None where it was not measured."""
        return self._found.get((data, direction, scored_with, metric))

    def value(self, data: str, direction: str, scored_with: str = "", metric: str = "") -> float:
        """The number alone, NaN where it was not measured."""
        found = self.get(data, direction, scored_with, metric)
        return float("nan") if found is None else found.value

    def scores(self, data: str, direction: str, metric: str) -> list[str]:
        """What the direction was scored with, of all that have this metric."""
        return [row.scored_with for row in self if row[:2] + row[3:4] == (data, direction, metric)]

    def __iter__(self) -> Iterator[Row]:
        for key, found in self._found.items():
            yield Row(*key, found.value, found.low, found.high, found.n)

    def __len__(self) -> int:
        return len(self._found)

    def csv(self) -> bytes:
        """The rows under their names, as a file holds them; NaN is an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(Row._fields)
        writer.writerows([["" if x != x else x for x in row] for row in self])
        return text.getvalue().encode()
