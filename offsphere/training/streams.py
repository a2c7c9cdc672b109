"""Named random streams. Every draw is a function of (seed, name, step): a resume has no state to
restore, workers cannot change it, and two cells with one seed see the same weights, batches and
augmentations.

One generator for a whole run could not give that: a cell that draws one number more than another
(a calibration, a dropout) would shift all that is drawn after it, and the two runs would differ in
more than the cell. So each use has a generator of its own, seeded by a hash of what it is for.
"""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


def stream_seed(seed: int, name: str, step: int = 0) -> int:
    """A 63-bit seed for one use of one stream."""
    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, name: str, step: int = 0) -> torch.Generator:
    """The generator of one use of one stream, on the CPU so that devices agree."""
    return torch.Generator().manual_seed(stream_seed(seed, name, step))


def batch_indices(seed: int, step: int, batch_size: int, population: int) -> Int[Tensor, " b"]:
    """The samples of one step: permutations, one per epoch, laid end to end and cut into batches.

    Every sample comes once in every epoch. A batch that spans two epochs holds no sample twice:
    the samples that end an epoch are moved behind the first ones of the next.
    """
    epoch, within = divmod(step * batch_size, population)
    batch = _order(seed, epoch, batch_size, population)[within : within + batch_size]
    if missing := batch_size - len(batch):
        batch = torch.cat([batch, _order(seed, epoch + 1, batch_size, population)[:missing]])
    return batch


@lru_cache(maxsize=3)
def _order(seed: int, epoch: int, batch_size: int, population: int) -> Int[Tensor, " n"]:
    if population < 2 * batch_size:
        for earlier in range(0, epoch, 500):  # so that no recursion is deeper than that
            _chained_order(seed, earlier, batch_size, population)
        return _chained_order(seed, epoch, batch_size, population)
    # Only the first batch's places change hands, so the end of the epoch before is as it was drawn.
    before = _permutation(seed, max(epoch - 1, 0), population)
    return _follow(before, _permutation(seed, epoch, population), epoch, batch_size)


@cache
def _chained_order(seed: int, epoch: int, batch_size: int, population: int) -> Int[Tensor, " n"]:
    """The order where an epoch is so short that each one depends on the one before."""
    drawn = _permutation(seed, epoch, population)
    if epoch == 0:
        return drawn
    return _follow(
        _chained_order(seed, epoch - 1, batch_size, population), drawn, epoch, batch_size
    )


def _permutation(seed: int, epoch: int, population: int) -> Int[Tensor, " n"]:
    return torch.randperm(population, generator=stream(seed, "order", epoch))


def _follow(
    before: Int[Tensor, " n"], drawn: Int[Tensor, " n"], epoch: int, batch_size: int
) -> Int[Tensor, " n"]:
    """This epoch's order, whose first samples share no batch with themselves in the one before.

    Where the batch does not divide the population, the epochs meet inside a batch: its `carried`
    first samples end the epoch before, its `first` others begin this one. A sample that was drawn
    for both would be its own negative. So each of those trades places with one further back that
    was not in the batch; nothing is drawn anew, and every sample still comes once.
    """
    carried = epoch * len(drawn) % batch_size
    if not carried:
        return drawn
    first = batch_size - carried
    seen = torch.isin(drawn, before[-carried:])
    clash = seen[:first].nonzero()[:, 0]
    free = (~seen[first:]).nonzero()[: len(clash), 0] + first
    order = drawn.clone()
    order[clash], order[free] = drawn[free], drawn[clash]
    return order
