"""Named random streams. Every draw is a function of (seed, name, step): a resume has no state to
restore, workers cannot change it, and two cells with one seed see the same weights, batches and
augmentations."""

from __future__ import annotations

import hashlib
from functools import lru_cache
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
    """The samples of one step: each epoch is one permutation, cut into whole batches.

    The remainder of an epoch, fewer than a batch, is another one in every epoch.
    """
    epoch, within = divmod(step, population // batch_size)
    return _order(seed, epoch, population)[within * batch_size : (within + 1) * batch_size]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, population: int) -> Int[Tensor, " n"]:
    return torch.randperm(population, generator=stream(seed, "order", epoch))
