"""Power: what a number of paired seeds can show, by the noncentral t distribution. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from offsphere.analysis.stats import check_margin

MOST_SEEDS = 1000
POWER = 0.8


def t_power(difference: float, error: float, dof: float, *, alpha: float = 0.05) -> float:
    """Chance that a two-sided t-test with this standard error sees a true difference."""
    shift = abs(difference) / error
    critical = special.stdtrit(dof, 1 - alpha / 2)
    # scipy gives NaN for a chance of the wrong sign that is too small for it.
    wrong_sign = np.nan_to_num(special.nctdtr(dof, shift, -critical))
    return float(1 - special.nctdtr(dof, shift, critical) + wrong_sign)


def inside_power(
    difference: float, error: float, dof: float, margin: float, *, alpha: float = 0.05
) -> float:
    """Chance that TOST with this standard error accepts a true difference as inside the margin."""
    check_margin(margin)
    critical = special.stdtrit(dof, 1 - alpha)
    # Over the measured error, a chi variable: accepted where |mean| < margin - t * measured error.
    shares = (np.arange(400) + 0.5) / 400
    measured = error * np.sqrt(2 * special.gammaincinv(dof / 2, shares) / dof)
    room = np.maximum(margin - critical * measured, 0.0)
    inside = special.ndtr((room - difference) / error) - special.ndtr((-room - difference) / error)
    return float(inside.mean())


def t_test_power(n: int, sd: float, difference: float, *, alpha: float = 0.05) -> float:
    """Chance that the two-sided paired t-test of n seeds sees a true difference."""
    _check_spread(n, sd)
    return t_power(difference, sd / math.sqrt(n), n - 1, alpha=alpha)


def smallest_difference(n: int, sd: float) -> float:
    """The true difference that the paired t-test of n seeds sees with 80 % power."""
    from scipy.optimize import root_scalar

    _check_spread(n, sd)

    def surplus(difference: float) -> float:
        return t_test_power(n, sd, difference) - POWER

    highest = sd
    while surplus(highest) < 0:
        highest *= 2
    return float(root_scalar(surplus, bracket=(0.0, highest), xtol=1e-9 * sd).root)


def seeds_for_difference(sd: float, difference: float, *, alpha: float = 0.05) -> int | None:
    """The fewest seeds with which the paired t-test sees the difference with 80 % power; None: over
    1000."""
    return fewest(lambda n: t_test_power(n, sd, difference, alpha=alpha) >= POWER)


def fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest n from 2 to 1000 that is enough, as every larger n then is."""
    high = 2
    while not enough(high):
        if high == MOST_SEEDS:
            return None
        high = min(2 * high, MOST_SEEDS)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _check_spread(n: int, sd: float) -> None:
    if n < 2 or not 0 < sd < math.inf:
        raise ValueError(f"Power needs at least 2 seeds and a spread above 0, got {n} and {sd}.")
