"""A number with its interval: the one form in which anything measured is handed on. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value, the ends of its interval, and how many independent examples it rests on.

    What counts as an example (a seed, an image with its captions, a query) is said by whoever
    makes the estimate. Without an interval both ends are NaN.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0

    @property
    def bounded(self) -> bool:
        """Whether both ends of the interval are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def excludes(self, number: float) -> bool:
        """Whether the interval lies wholly on one side of a number."""
        return self.low > number or self.high < number

    def times(self, factor: float) -> Estimate:
        """The same in other units, such as points for shares (100); the factor is above 0."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n)

    def __format__(self, spec: str) -> str:
        """`value [low, high]`, each number by the format; the value alone without an interval."""
        value = format(self.value, spec)
        if not self.bounded:
            return value
        return f"{value} [{format(self.low, spec)}, {format(self.high, spec)}]"
