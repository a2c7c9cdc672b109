"""k-means on features and its agreement with the labels (normalised mutual information)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.evaluation.checks import check_split

if TYPE_CHECKING:
    from jaxtyping import Float, Int

RESTARTS, MOST_ITERATIONS = 3, 100


def clustering(features: Float[Tensor, "n d"], labels: Int[Tensor, " n"]) -> float:
    """NMI of the labels with the best of several k-means runs; as many clusters as classes."""
    check_split(features, labels, "clustering")
    generator = torch.Generator().manual_seed(0)
    runs = [kmeans(features, len(labels.unique()), generator) for _ in range(RESTARTS)]
    assignments, *_ = min(runs, key=lambda run: run[2])
    return nmi(labels, assignments)


def kmeans(
    features: Float[Tensor, "n d"], clusters: int, generator: torch.Generator
) -> tuple[Int[Tensor, " n"], Float[Tensor, "k d"], float]:
    """Lloyd's algorithm from k-means++ seeds: assignments, centres, mean squared distance.

    An emptied cluster takes the row farthest from its centre.
    """
    if not 2 <= clusters <= len(features):
        raise ValueError(
            f"k-means of {len(features)} rows needs 2 to {len(features)} clusters, got {clusters}."
        )
    features = features.detach()
    squares = features.square().sum(1)
    centres = _spread_seeds(features, clusters, generator)
    assignments, distance = _nearest_centre(features, centres, squares)
    for _ in range(MOST_ITERATIONS):
        centres = _centres(features, assignments, distance, clusters)
        moved, distance = _nearest_centre(features, centres, squares)
        if torch.equal(moved, assignments):
            break
        assignments = moved
    return assignments, centres, distance.double().mean().item()


def nmi(a: Int[Tensor, " n"], b: Int[Tensor, " n"]) -> float:
    """Mutual information of two labellings over the mean of their entropies; 1 for one block."""
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise ValueError(
            "Expected two labellings of the same examples, got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}."
        )
    a, b = a.unique(return_inverse=True)[1], b.unique(return_inverse=True)[1]
    width = int(b.max()) + 1
    joint = torch.bincount(a * width + b, minlength=(int(a.max()) + 1) * width).double()
    joint = (joint / len(a)).view(-1, width)
    entropy_a, entropy_b = _entropy(joint.sum(1)), _entropy(joint.sum(0))
    information = entropy_a + entropy_b - _entropy(joint.flatten())
    mean = (entropy_a + entropy_b) / 2
    return 1.0 if mean == 0 else (information / mean).clamp(0, 1).item()


def _entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum()


def _spread_seeds(features: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next centre is a row drawn with probability of its squared distance."""
    first = int(torch.randint(len(features), (), generator=generator))
    chosen = [first]
    distance = (features - features[first]).square().sum(1)
    for _ in range(clusters - 1):
        total = distance.double().cumsum(0)
        draw = torch.rand((), generator=generator, dtype=torch.float64).to(total.device)
        row = int(torch.searchsorted(total, draw * total[-1], right=True).clamp_max(len(total) - 1))
        chosen.append(row)
        distance = torch.minimum(distance, (features - features[row]).square().sum(1))
    return features[chosen]


def _nearest_centre(features: Tensor, centres: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.addmm(centres.square().sum(1)[:, None], centres, features.T, alpha=-2)
    nearest = offsets.min(0)
    return nearest.indices, (nearest.values + squares).clamp_min(0)


def _centres(features: Tensor, assignments: Tensor, distance: Tensor, clusters: int) -> Tensor:
    member = assignments == torch.arange(clusters, device=assignments.device)[:, None]
    count = member.sum(1)
    centres = member.to(features.dtype) @ features / count.clamp_min(1)[:, None]
    empty = (count == 0).nonzero().flatten()
    if len(empty):
        centres[empty] = features[distance.topk(len(empty)).indices]
    return centres
