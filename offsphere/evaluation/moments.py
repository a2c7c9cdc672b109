"""Second moments of a reference set of vectors, in one pass, and what whitening needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

SLAB = 4096
"""Rows that are turned to float64, or compared with a whole reference set, at a time."""


@dataclass(frozen=True)
class Moments:
    """What one pass over the centred references leaves behind."""

    rows: int
    means: tuple[Float[Tensor, " d"], ...]
    """One per side."""
    covariance: Float[Tensor, "d d"]
    """Population form, pooled over the sides, each about its own mean."""
    fourth: Float[Tensor, ""]
    """Mean of |x - mean|**4."""
    rounding: float
    """The variance that rounding of the input alone can put into a direction."""


def ledoit_wolf_shrinkage(moments: Moments) -> float:
    """The shrinkage of least expected squared error towards mean variance times identity (2004)."""
    covariance = moments.covariance
    mean_variance = covariance.diagonal().mean()
    target = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    distance = (covariance - mean_variance * target).square().sum()
    error = ((moments.fourth - covariance.square().sum()) / moments.rows).clamp_min(0)
    return (torch.minimum(error, distance) / distance).item() if distance > 0 else 0.0


def moments_of(sides: list[Tensor]) -> Moments:
    """The moments of one or two sides, a slab of rows at a time."""
    for side in sides:
        if len(side) < 2:
            raise ValueError(
                f"A covariance needs at least two reference rows per side, got {len(side)}."
            )
    means = tuple(side.mean(0, dtype=torch.float64) for side in sides)
    rows, d = sum(len(side) for side in sides), sides[0].shape[1]
    scatter = torch.zeros(d, d, dtype=torch.float64, device=sides[0].device)
    fourth = scatter.new_zeros(())
    for side, mean in zip(sides, means, strict=True):
        for slab in side.split(SLAB):
            centred = slab.double() - mean
            scatter += centred.T @ centred
            fourth += centred.square().sum(1).square().sum()
    eps = max(torch.finfo(side.dtype).eps for side in sides)
    largest = max(side.abs().max().item() for side in sides)
    return Moments(rows, means, scatter / rows, fourth / rows, d * (eps * largest) ** 2)


def spectrum(moments: Moments, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Variances above rounding error and their directions, largest first, after shrinkage."""
    variances, directions = torch.linalg.eigh(moments.covariance)
    variances, directions = variances.flip(0), directions.flip(1)
    largest = variances[0].item()
    if not largest > moments.rounding:
        raise ValueError(
            f"The {moments.rows} reference rows do not vary: there is no covariance to work with. "
            "Fit on embeddings of an encoder that has not collapsed."
        )
    shrunk = (1 - shrinkage) * variances.clamp_min(0) + shrinkage * variances.mean()
    floor = len(shrunk) * torch.finfo(torch.float64).eps * largest
    kept = shrunk > max(floor, moments.rounding)
    return shrunk[kept], directions[:, kept]


def absolute_correlation(reference: Tensor) -> Tensor:
    """|correlation| of the features; a constant feature has 1 with itself and 0 with others."""
    moments = moments_of([reference])
    std = moments.covariance.diagonal().sqrt()
    magnitude = reference.abs().amax(0).double()
    varies = std > 16 * torch.finfo(reference.dtype).eps * magnitude
    inverse = torch.where(varies, 1 / std, torch.zeros_like(std))
    correlation = (inverse[:, None] * moments.covariance * inverse).abs().clamp_max(1)
    return correlation.fill_diagonal_(1.0)
