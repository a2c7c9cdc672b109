"""The intervals of a benchmark: each cell's metrics, and their paired differences to cosine.

Images are what is drawn again, captions going with theirs; few right answers, few wrong ones or
few changed ones have closed intervals (`offsphere.evaluation.intervals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.evaluation.intervals import change_interval, share_interval

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Interval = tuple[float, float]
ByCell = Mapping[str, Mapping[str, Tensor]]


def intervals(
    metrics: Mapping[str, Mapping[str, float]], drawn: ByCell, images: int, level: float
) -> dict[str, dict[str, Interval]]:
    """Of every cell and metric, from the metric's values on images drawn again."""
    return {
        cell: {
            name: share_interval(metrics[cell][name], values, images, level)
            for name, values in of_cell.items()
        }
        for cell, of_cell in drawn.items()
    }


def minus_cosine(
    metrics: Mapping[str, Mapping[str, float]],
    drawn: ByCell,
    outcomes: ByCell,
    owner: Int[Tensor, " m"] | None,
    cells: Mapping[str, tuple[float, float]],
    level: float,
) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Each metric's difference to the cosine cell on the same images, and its interval."""

    def difference(cell: str, name: str) -> tuple[float, float, float]:
        if ranks_alike(name, cells[cell], cells["cosine"]):
            return 0.0, 0.0, 0.0
        changes = image_changes(name, outcomes[cell], outcomes["cosine"], owner)
        again = drawn[cell][name] - drawn["cosine"][name]
        value = metrics[cell][name] - metrics["cosine"][name]
        return value, *change_interval(changes, again, level)

    return {cell: {name: difference(cell, name) for name in drawn[cell]} for cell in drawn}


def ranks_alike(metric: str, cell: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two cells give a metric by construction the same value: candidates decide alone."""
    sides = {"mean": (0, 1), "t2i": (0,)}.get(metric.partition("_r")[0], (1,))
    return all(cell[side] == other[side] for side in sides)


def image_changes(
    metric: str,
    outcomes: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    owner: Int[Tensor, " m"] | None,
) -> Float[Tensor, " images"]:
    """What each image contributes to the difference of a metric; their mean is the difference."""
    if metric == "mean_r1":
        both = (image_changes(name, outcomes, base, owner) for name in ("i2t_r1", "t2i_r1"))
        return sum(both, torch.zeros(())) / 2
    # Classes weigh images by the size of their class; whether an answer changed is the same.
    names = {"top1": "correct", "mean_class_recall": "correct"}
    key = names.get(metric, metric.replace("_r", "_hit"))
    changes = outcomes[key].double() - base[key].double()
    if owner is None or not metric.startswith("t2i"):
        return changes
    images = len(outcomes["i2t_rank"])
    return torch.bincount(owner.cpu(), changes, minlength=images) * (images / len(owner))
