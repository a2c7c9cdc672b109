"""A claim's verdict in words that follow its interval and its margin: one rule for all. No torch.

Let the interval lie so that the expected sign is positive.

    shown beyond the margin    it lies above the margin
    shown, inside the margin   it lies above 0 and inside the margin
    shown                      it lies above 0 and holds the margin
    the opposite shown         it lies below 0
    equivalent                 it holds 0 and lies inside the margin
    excluded                   it holds 0, reaches beyond the margin, and not to the published size
    non-superior               of a claim that expects no gain: it lies below the margin
    not settled                none of these
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from offsphere.analysis.power import MOST_SEEDS, POWER, fewest, inside_power, t_power
from offsphere.analysis.stats import OverSeeds, check_margin, check_share, equivalence_p

Expectation = Literal["greater", "less", "equivalent", "not_greater"]
EXPECTATIONS: tuple[Expectation, ...] = ("greater", "less", "equivalent", "not_greater")
Word = Literal[
    "shown beyond the margin",
    "shown, inside the margin",
    "shown",
    "the opposite shown",
    "equivalent",
    "excluded",
    "non-superior",
    "not settled",
]


@dataclass(frozen=True)
class Decision:
    """The verdict on a claim, in a few words and one sentence."""

    word: Word
    sentence: str
    holds: bool | None
    """Whether what was expected is there; None: not known."""
    seeds_needed: int | None
    """For a claim that is not settled: the seeds that settle it with 80 % power, if mean and
    spread are the true ones; None: more than 1000."""


def claim_p(measured: OverSeeds, expect: Expectation, margin: float | None) -> float:
    """p of a claim's own question, the one that enters its family.

    greater, less: is there a difference (two-sided). equivalent: is it inside the margin (TOST).
    not_greater: is it below the margin (one-sided).
    """
    if expect in ("greater", "less"):
        return measured.p
    if margin is None:
        raise ValueError(f"A claim that expects {expect!r} needs a margin.")
    check_margin(margin)
    if expect == "equivalent":
        return equivalence_p(measured, margin)
    return measured.p_below(margin)


def verdict(
    measured: OverSeeds,
    expect: Expectation,
    margin: float | None = None,
    *,
    published: float | None = None,
    alpha: float = 0.05,
    p_adjusted: float | None = None,
    family: int = 1,
) -> Decision:
    """What the seeds say about a claim fixed in advance.

    A claim's own question is answered by its p, adjusted for its family (Holm); sizes by the
    interval that holds for all `family` claims at once (level 1 - alpha / family). `published` is
    the size in print, in the unit of the measure.
    """
    check_share("alpha", alpha)
    p = claim_p(measured, expect, margin)
    yes = (p if p_adjusted is None else p_adjusted) <= alpha
    word = _word(measured, expect, margin, published, yes=yes, alpha=alpha / family)
    needed = None
    if word == "not settled":
        needed = seeds_to_settle(measured, expect, margin, alpha=alpha / family)
    said = _sentence(measured, word, margin, published, needed)
    return Decision(word, said, _holds(word, expect), needed)


def seeds_to_settle(
    measured: OverSeeds,
    expect: Expectation,
    margin: float | None,
    *,
    alpha: float = 0.05,
) -> int | None:
    """The fewest seeds that decide with 80 % power if mean and spread are the true ones.

    More seeds do not shrink the part of the error that comes from the test examples.
    """
    fixed = measured.example_error**2
    per_seed = max(measured.standard_error**2 - fixed, 0.0) * measured.n

    def enough(n: int) -> bool:
        variance = per_seed / n + fixed
        if variance == 0:
            return _settled_by_signs(replace(measured, n=n), expect, margin, alpha)
        spread = (per_seed / n) ** 2 / (n - 1)
        spread += fixed**2 / (measured.examples - 1) if fixed else 0.0
        error, dof = math.sqrt(variance), max(variance**2 / spread, n - 1.0)
        chances = []
        if expect in ("greater", "less"):
            chances.append(t_power(measured.value, error, dof, alpha=alpha))
        if expect == "not_greater" and margin is not None:
            # One-sided, so twice alpha in the two-sided test; its wrong sign hardly counts.
            chances.append(t_power(margin - measured.value, error, dof, alpha=2 * alpha))
        elif margin is not None:
            chances.append(inside_power(measured.value, error, dof, margin, alpha=alpha))
        return max(chances) >= POWER

    return fewest(enough)


def _settled_by_signs(
    measured: OverSeeds, expect: Expectation, margin: float | None, alpha: float
) -> bool:
    """Whether the exact test of seeds that do not differ at all decides."""
    p = 2 * min(measured.p_above(0.0), measured.p_below(0.0))
    asked: list[Expectation] = [expect]
    if expect != "not_greater" and margin is not None:
        asked.append("equivalent")
    return min(claim_p(replace(measured, p=p), x, margin) for x in asked) <= alpha


def _word(
    measured: OverSeeds,
    expect: Expectation,
    margin: float | None,
    published: float | None,
    *,
    yes: bool,
    alpha: float,
) -> Word:
    low, high = measured.interval(1 - alpha)
    sign = -1.0 if expect == "less" else 1.0
    if expect == "not_greater" and margin is not None:
        if yes:
            return "non-superior"
        return "shown beyond the margin" if low > margin else "not settled"
    inside = margin is not None and equivalence_p(measured, margin) <= alpha
    seen = yes
    if expect == "equivalent":
        inside, seen = yes, low > 0 or high < 0
        sign = math.copysign(1.0, measured.value)
    if sign < 0:
        low, high = -high, -low
    size = None if published is None else sign * published
    if seen:
        if sign * measured.value < 0:
            return "the opposite shown"
        if margin is not None and low > margin:
            return "shown beyond the margin"
        return "shown, inside the margin" if inside else "shown"
    if inside:
        return "equivalent"
    return "excluded" if size is not None and not low <= size <= high else "not settled"


def _holds(word: Word, expect: Expectation) -> bool | None:
    if word in ("not settled", "excluded"):
        return None if word == "not settled" else False
    if expect == "equivalent":
        inside = {"equivalent": True, "shown, inside the margin": True}
        return inside.get(word, False if word == "shown beyond the margin" else None)
    if expect == "not_greater":
        return word == "non-superior"
    return word.startswith("shown")


def _sentence(
    measured: OverSeeds,
    word: Word,
    margin: float | None,
    published: float | None,
    needed: int | None,
) -> str:
    over = measured.count
    over += f" and {measured.examples:,} examples" if measured.examples else ""
    over += f", {measured.dropped} dropped" if measured.dropped else ""
    size = f"{measured.value:+.3g} ({measured.level:.0%} interval {measured.low:+.3g} to "
    size += f"{measured.high:+.3g}, {over})"
    bound = "" if margin is None else f"the margin of {margin:.3g}"
    side = "above" if measured.value > 0 else "below"
    said = {
        "shown beyond the margin": f"lies beyond {bound}",
        "shown, inside the margin": f"is {side} 0 and inside {bound}",
        "shown": f"is {side} 0" + (f"; {bound} is not excluded" if margin else ""),
        "the opposite shown": f"is {side} 0, the other side than expected",
        "equivalent": f"lies inside {bound}",
        "excluded": f"does not reach the published {published or 0:+.3g}",
        "non-superior": f"lies below {bound}",
        "not settled": "settles nothing",
    }[word]
    text = f"{size} {said}."
    if word == "not settled":
        if needed is not None:
            text += f" If mean and spread are the true ones, {needed} {measured.unit}s settle it "
            text += "with 80 % power."
        elif measured.example_error > 0:
            text += f" {MOST_SEEDS} {measured.unit}s would not: it takes more test examples."
        else:
            text += f" It would take more than {MOST_SEEDS} {measured.unit}s."
    return text
