"""Intervals of shares and of their paired differences, also where a bootstrap collapses.

Examples drawn again can only repeat what was seen: of 20 right answers every draw is 100 % right,
and the interval has no width. Where there are fewer than `FEW` answers of a kind, or changed
answers, closed formulas that know the number of examples take its place.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

FEW = 5.0


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


def share_interval(
    share: float, drawn: Float[Tensor, " times"], n: int, level: float
) -> tuple[float, float]:
    """The interval of a share over n independent examples, from its bootstrap values."""
    if min(share, 1 - share) * n < FEW:
        return wilson(min(max(share, 0.0), 1.0), n, level)
    return percentiles(drawn, level)


def change_interval(
    changes: Float[Tensor, " n"], drawn: Float[Tensor, " times"], level: float
) -> tuple[float, float]:
    """The interval of a mean change between -1 and 1, from each example's own change."""
    gains, losses = changes.clamp(min=0).sum().item(), (-changes).clamp(min=0).sum().item()
    if gains + losses < FEW:
        return square_and_add(gains, losses, len(changes), level)
    return percentiles(drawn, level)
