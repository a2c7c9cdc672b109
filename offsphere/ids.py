"""Ids: which rows of a batch are the same thing, such as five captions of one picture.

A vector of whole numbers, never a matrix: what two rows have to do with each other is found where
it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.names import FALSE_NEGATIVES, unknown
from offsphere.precision import row_products

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def mean_positives(
    left: Float[Tensor, "n d"], right: Float[Tensor, "m d"], ids: Int[Tensor, " m"]
) -> Float[Tensor, ""]:
    """The sum over left rows, whose ids come first, of their mean product with what has their id.

    The mean of products is the product with the mean: ids are summed first, no score is computed.
    An id's place is that of its first occurrence in order, so nothing waits for the device.
    """
    places = torch.searchsorted(ids.sort().values, ids)
    zeros = right.new_zeros(len(ids), right.shape[1])
    counts = right.new_zeros(len(ids)).index_add(0, places, right.new_ones(len(ids)))
    sums = (zeros.index_add(0, places[: len(left)], left), zeros.index_add(0, places, right))
    return (row_products(*sums) / counts.clamp_min(1)).sum()


def row_ids(tokens: Int[Tensor, "n l"]) -> Int[Tensor, " n"]:
    """An id for each row of tokens, equal for equal rows on every rank; 0 is padding.

    It is a sum with fixed random factors, modulo 2**64: rows that differ share it with a chance of
    about 2**-60. Padding adds nothing, so that rows of different batches can be equal too.
    """
    g = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (tokens.shape[1],), generator=g)
    return (tokens.long() * factors.to(tokens.device)).sum(1)


def check_ids(
    ids: Tensor, columns: int, false_negatives: str, device: torch.device
) -> Int[Tensor, " m"]:
    """The ids on this device; an error if they do not fit the columns, or the way is unknown."""
    if false_negatives not in FALSE_NEGATIVES:
        raise unknown("value of false_negatives", false_negatives, FALSE_NEGATIVES)
    if ids.shape != (columns,) or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"Expected ids as {columns} whole numbers, one for each right row and hard negative, "
            f"got {tuple(ids.shape)} of {ids.dtype}."
        )
    return ids.to(device)
