"""Class vectors: the texts that name a class as one candidate of zero-shot classification.

An image's own norm never changes its ranking of the classes, so only the text side's exponent
counts: cosine ties with dnorm, and dot with qnorm, by construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.cells import SMALLEST_NORM
from offsphere.evaluation.checks import checked_side
from offsphere.evaluation.geometry import unit

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def class_vectors(
    texts: Float[Tensor, "t d"], owner: Int[Tensor, " t"], classes: int, exponent: float
) -> Float[Tensor, "c d"]:
    """One vector per class: the unit mean direction of its texts times their mean |x|^(1-g).

    For exponent g = 1 this is clip-benchmark's class embedding; for a single text per class it is
    x / |x|^g.
    """
    texts, owner = _checked_texts(texts, owner, classes)
    weight = torch.bincount(owner, minlength=classes).to(texts)[:, None]
    summed = texts.new_zeros(classes, texts.shape[1])
    direction = unit(summed.index_add(0, owner, unit(texts)) / weight)
    norm = torch.linalg.vector_norm(texts, dim=1, keepdim=True).clamp_min(SMALLEST_NORM)
    length = norm ** (1 - float(exponent))
    return direction * texts.new_zeros(classes, 1).index_add(0, owner, length) / weight


def _checked_texts(texts: Tensor, owner: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    texts = checked_side(texts, "class text")
    if owner.shape != texts.shape[:1] or owner.is_floating_point():
        raise ValueError(
            f"Expected the number of its class for each of {len(texts)} texts, got {owner.dtype} "
            f"of shape {tuple(owner.shape)}."
        )
    owner = owner.long().to(texts.device)
    if owner.min() < 0 or owner.max() >= classes:
        raise ValueError(
            f"The texts' classes must be between 0 and {classes - 1}, got {int(owner.min())} to "
            f"{int(owner.max())}."
        )
    without = (torch.bincount(owner, minlength=classes) == 0).nonzero().flatten()
    if len(without):
        raise ValueError(
            f"{len(without)} of {classes} classes have no text (first: class {int(without[0])}): "
            "give each class at least one."
        )
    return texts, owner
