"""Zero-shot classification: images are the queries, class vectors made of texts the candidates.

An image's own norm never changes its ranking of the classes, so only the text side's exponent
counts: cosine ties with dnorm, and dot with qnorm, by construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offsphere.cells import SMALLEST_NORM
from offsphere.evaluation.checks import checked_side
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.retrieval import standings

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CLASSES_FOR_TOP5 = 5


class ZeroShot(NamedTuple):
    metrics: dict[str, float]
    """top1, top5 (from five classes on), mean_class_recall, and what chance and always naming the
    largest class would give."""
    outcomes: dict[str, Tensor]
    """Per image: correct (a probability where scores tie), top5, rank and label, on the CPU."""


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


def zero_shot(
    images: Float[Tensor, "n d"], vectors: Float[Tensor, "c d"], labels: Int[Tensor, " n"]
) -> ZeroShot:
    """Accuracy of naming the class whose vector has the largest product with the image.

    Equal scores count with their expected value under random tie-breaking.
    """
    images, vectors = checked_side(images, "image"), checked_side(vectors, "class")
    labels = _checked_labels(labels, len(images), len(vectors)).to(images.device)
    rows = torch.arange(len(images), device=images.device)
    standing = standings(unit(images), vectors, rows, labels)
    labels, correct = labels.cpu(), standing.hit(1)
    count = torch.bincount(labels, minlength=len(vectors)).double()
    recalls = torch.bincount(labels, weights=correct, minlength=len(vectors)) / count
    metrics = {
        "top1": correct.mean().item(),
        "mean_class_recall": recalls[count > 0].mean().item(),
        "chance": 1 / len(vectors),
        "majority": (count.max() / len(labels)).item(),
    }
    outcomes = {"correct": correct, "rank": standing.rank(), "label": labels}
    if len(vectors) >= CLASSES_FOR_TOP5:
        outcomes["top5"] = standing.hit(5)
        metrics["top5"] = outcomes["top5"].mean().item()
    return ZeroShot(metrics, outcomes)


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


def _checked_labels(labels: Tensor, images: int, classes: int) -> Tensor:
    if labels.shape != (images,) or labels.is_floating_point():
        raise ValueError(
            f"Expected one class number for each of {images} images, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"Labels must be between 0 and {classes - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}: do the class names belong to this data?"
        )
    return labels.long()
