"""Power: what a number of paired seeds can show, by the noncentral t distribution. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from offsphere.analysis.stats import check_margin, check_share

MOST_SEEDS = 1000


@dataclass(frozen=True)
class PowerNote:
    """What a number of seeds can show at a given spread of the paired differences."""

    n: int
    sd: float
    smallest_difference: float
    """Seen with the stated power by the two-sided paired t-test."""
    margin: float | None
    seeds_for_equivalence: int | None
    """Seeds with which TOST accepts a true difference of 0; None: more than 1000 or no margin."""
    text: str


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


def equivalence_power(
    n: int, sd: float, margin: float, *, difference: float = 0.0, alpha: float = 0.05
) -> float:
    """Chance that TOST of n seeds accepts a true difference as inside the margin."""
    _check_spread(n, sd)
    return inside_power(difference, sd / math.sqrt(n), n - 1, margin, alpha=alpha)


def smallest_difference(n: int, sd: float, *, power: float = 0.8, alpha: float = 0.05) -> float:
    """The true difference that the paired t-test of n seeds sees with this power."""
    from scipy.optimize import root_scalar

    _check_spread(n, sd)
    check_share("power", power)

    def surplus(difference: float) -> float:
        return t_test_power(n, sd, difference, alpha=alpha) - power

    highest = sd
    while surplus(highest) < 0:
        highest *= 2
    return float(root_scalar(surplus, bracket=(0.0, highest), xtol=1e-9 * sd).root)


def seeds_for_difference(
    sd: float, difference: float, *, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """The fewest seeds with which the paired t-test sees the difference; None: over 1000."""
    return fewest(lambda n: t_test_power(n, sd, difference, alpha=alpha) >= power)


def seeds_for_equivalence(
    sd: float, margin: float, *, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """The fewest seeds with which TOST accepts a true difference of 0; None: over 1000."""
    return fewest(lambda n: equivalence_power(n, sd, margin, alpha=alpha) >= power)


def power_note(
    n: int, sd: float, margin: float | None = None, *, power: float = 0.8, alpha: float = 0.05
) -> PowerNote:
    """What n seeds can show when paired differences spread by sd."""
    smallest = smallest_difference(n, sd, power=power, alpha=alpha)
    text = f"With {n} seeds only differences above {smallest:.3g} are seen with {power:.0%} power."
    needed = None
    if margin is not None:
        needed = seeds_for_equivalence(sd, margin, power=power, alpha=alpha)
        seeds = f"more than {MOST_SEEDS}" if needed is None else str(needed)
        text += f" To show equivalence within {margin:.3g}, TOST needs {seeds} seeds."
    return PowerNote(n, sd, smallest, margin, needed, text)


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
