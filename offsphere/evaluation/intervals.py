"""Estimates of shares and of their paired differences, also where a bootstrap collapses.

Examples drawn again can only repeat what was seen: of 20 right answers every draw is 100 % right,
and the interval has no width. Where there are fewer than `FEW` answers of a kind, or changed
answers, closed formulas that know the number of examples take its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from offsphere.estimate import Estimate

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FEW = 5.0
BETS = (0.5, 0.75, 1.0)
"""Shares that the exact test bets, on either sign: few, so that little is lost on wrong ones, and
high, as few examples can settle only what is large."""
DRAWS_AT_ONCE = 2**22
"""Drawn examples of the bootstrap in memory."""


def percentiles(values: Float[Tensor, " times"], level: float) -> tuple[float, float]:
    """The middle of bootstrap values; a draw that has no value (NaN) is left out."""
    tail = (1 - level) / 2
    low, high = values.nanquantile(torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


def wilson(share: float, n: int, level: float) -> tuple[float, float]:
    """Wilson's score interval of a share of n examples, which stays inside 0 and 1."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def square_and_add(gains: float, losses: float, n: int, level: float) -> tuple[float, float]:
    """The interval of (gains - losses) / n in n pairs, from Wilson's intervals of both shares.

    Newcombe's square-and-add: the distances of the two shares to their own limits add up like
    standard errors, so that no change at all among n pairs still leaves room for a few.
    """
    gain, loss = gains / n, losses / n
    (least_gain, most_gain), (least_loss, most_loss) = (
        wilson(share, n, level) for share in (gain, loss)
    )
    low = gain - loss - math.hypot(gain - least_gain, most_loss - loss)
    high = gain - loss + math.hypot(most_gain - gain, loss - least_loss)
    return low, high


def share(value: float, drawn: Float[Tensor, " times"], n: int, level: float) -> Estimate:
    """A mean of n independent numbers between 0 and 1, from its bootstrap values."""
    if min(value, 1 - value) * n < FEW:
        return Estimate(value, *wilson(min(max(value, 0.0), 1.0), n, level), n)
    return Estimate(value, *percentiles(drawn, level), n)


def change(
    value: float, changes: Float[Tensor, " n"], drawn: Float[Tensor, " times"], level: float
) -> Estimate:
    """A mean change between -1 and 1, from each example's own change and the bootstrap values."""
    gains, losses = changes.clamp(min=0).sum().item(), (-changes).clamp(min=0).sum().item()
    if gains + losses < FEW:
        ends = square_and_add(gains, losses, len(changes), level)
    else:
        ends = percentiles(drawn, level)
    return Estimate(value, *ends, len(changes))


def zero_mean_p(changes: Float[Tensor, " n"], most: float) -> float:
    """p of the hypothesis that independent changes from -`most` to `most` are 0 in the mean.

    If that is so, to bet a share of what one has on each change is a fair game: nobody expects to
    win. The p is 1 / what `BETS` on both signs own at the end, together, of a stake of 1; by
    Markov's inequality it is at most a with a chance of at most a. Changes may be skewed, tied and
    few, where a sign test, a permutation of signs and a bootstrap raise false alarms (the many
    small gains of a mean that rare large losses make 0). (Waudby-Smith and Ramdas 2024.)
    """
    shares = (changes.double() / most).clamp(-1, 1)
    stakes = [sign * bet for bet in BETS for sign in (1, -1)]
    owned = torch.stack([torch.log1p(stake * shares).sum() for stake in stakes])
    return min(1.0, len(stakes) * (-owned.logsumexp(0)).exp().item())


def clustered_mean(
    values: Float[Tensor, " q"],
    cluster: Int[Tensor, " q"],
    level: float,
    resamples: int,
    seed: int,
    kind: Literal["share", "change", "number"] = "number",
) -> Estimate:
    """The mean, and its interval over clusters (images with their captions) drawn again."""
    total, count = cluster_sums(values, cluster)
    drawn = [total[tile].sum(1) / count[tile].sum(1) for tile in draws(len(total), resamples, seed)]
    mean, again, n = values.double().mean().item(), torch.cat(drawn), len(total)
    if kind == "share":
        return share(mean, again, n, level)
    if kind == "change":
        return change(mean, total * (n / len(values)), again, level)
    return Estimate(mean, *percentiles(again, level), n)


def cluster_sums(
    values: Float[Tensor, " q"], cluster: Int[Tensor, " q"]
) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """The sum of each cluster's values, and how many there are."""
    names, row = cluster.unique(return_inverse=True)
    total = torch.bincount(row, values.double(), minlength=len(names))
    return total, torch.bincount(row, minlength=len(names)).double()


def draws(examples: int, times: int, seed: int) -> Iterator[Int[Tensor, "b examples"]]:
    """`times` rows of examples drawn with replacement, some rows at a time.

    The same seed draws the same examples, so results of two scores on them are paired.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, DRAWS_AT_ONCE // examples)
    for start in range(0, times, rows):
        shape = (min(rows, times - start), examples)
        yield torch.randint(examples, shape, generator=generator)
