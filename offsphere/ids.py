"""Ids: which rows of a batch are the same thing, such as five captions of one picture.

A vector of whole numbers, never a matrix: what two rows have to do with each other is found where
it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.names import EQUAL, unknown
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


def check_ids(ids: Tensor, columns: int, equal: str, device: torch.device) -> Int[Tensor, " m"]:
    """The ids on this device, unless they are none or `equal` is no way to treat them."""
    if equal not in EQUAL:
        raise unknown("value of equal", equal, EQUAL)
    if ids.shape != (columns,) or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"Expected ids as {columns} whole numbers, one for each right row and hard negative, "
            f"got {tuple(ids.shape)} of {ids.dtype}."
        )
    return ids.to(device)
