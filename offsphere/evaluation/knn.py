"""Weighted nearest-neighbour classification that stays stable for raw, unnormalised features."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.evaluation.checks import check_classes, check_split
from offsphere.evaluation.geometry import top_items, unit

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

CALIBRATION_QUERIES = 512


class KnnResult(NamedTuple):
    accuracy: float
    correct: Bool[Tensor, " n"]
    predictions: Int[Tensor, " n"]
    confidence: Float[Tensor, " n"]
    """Share of the votes that the predicted class got."""


def knn(
    train: Float[Tensor, "m d"],
    train_labels: Int[Tensor, " m"],
    test: Float[Tensor, "n d"],
    test_labels: Int[Tensor, " n"],
    *,
    k: int = 20,
    temperature: float = 0.1,
    exponents: tuple[float, float] = (1.0, 1.0),
) -> KnnResult:
    """Accuracy of a vote of the k best training items, each with weight exp(score / temperature).

    The query is the left side and the training item the right side of the cell with the given
    exponents. For unit items (right exponent 1) this is the usual vote of cosines. Otherwise the
    temperature is multiplied by one number per training set: the mean over rows of the std of the
    top-k scores in this cell, over the same in the cosine cell. A query's own norm multiplies all
    its scores and its row's temperature alike, so the left exponent never changes a prediction.
    """
    check_split(train, train_labels, "train")
    check_split(test, test_labels, "test")
    check_classes(train_labels)
    if not temperature > 0:
        raise ValueError(f"The temperature must be above 0, got {temperature}.")
    queries, items = unit(test), shrink(train.detach(), float(exponents[1]))
    scores, nearest = top_items(queries, items, k)
    row_temperature = temperature * spread_ratio(train, k, exponents[1])
    labels, classes = train_labels[nearest].long(), int(train_labels.max()) + 1
    votes = vote(scores, labels, row_temperature, classes)
    share, predictions = (votes / votes.sum(1, keepdim=True)).max(1)
    correct = predictions == test_labels
    return KnnResult(correct.double().mean().item(), correct, predictions, share)


def vote(
    scores: Float[Tensor, "n k"],
    labels: Int[Tensor, "n k"],
    temperature: float | Float[Tensor, ""],
    classes: int,
) -> Float[Tensor, "n c"]:
    """Sum of exp((score - the row's largest score) / temperature) per class: at most k, no inf."""
    weights = ((scores - scores.amax(1, keepdim=True)) / temperature).exp()
    return weights.new_zeros(len(scores), classes).scatter_add_(1, labels, weights)


def spread_ratio(
    train: Float[Tensor, "m d"], k: int, item_exponent: float
) -> float | Float[Tensor, ""]:
    """Spread of the top-k scores with items at this exponent, relative to cosine's spread.

    Measured with up to 512 evenly spaced training items as unit queries that do not find
    themselves, so that no prediction depends on the rest of the test set.
    """
    if item_exponent == 1 or k == 1:
        return 1.0
    step = max(1, len(train) // CALIBRATION_QUERIES)
    own = torch.arange(0, len(train), step, device=train.device)[:CALIBRATION_QUERIES]
    neighbours = min(k, len(train) - 1)
    cosine, _ = top_items(unit(train[own]), unit(train), neighbours, exclude=own)
    items = shrink(train.detach(), float(item_exponent))
    here, _ = top_items(unit(train[own]), items, neighbours, exclude=own)
    spread, cosine_spread = _mean_row_spread(here), _mean_row_spread(cosine)
    tiny = torch.finfo(spread.dtype).tiny
    return torch.where(spread > 0, spread / cosine_spread.clamp_min(tiny), torch.ones_like(spread))


def _mean_row_spread(scores: Tensor) -> Tensor:
    return scores.std(1, correction=0).mean()
