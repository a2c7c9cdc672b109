"""What happens to the norms and the similarities while a run trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.evaluation.geometry import alignment, norm_statistics, rankme, uniformity, unit
from offsphere.objective import Objective
from offsphere.variance import negative_statistics

if TYPE_CHECKING:
    from jaxtyping import Float


@torch.no_grad()
def telemetry(
    left: Float[Tensor, "n d"], right: Float[Tensor, "n d"], objective: Objective
) -> dict[str, float]:
    """Named numbers of one batch of raw embeddings (left and right are its two sides)."""
    u, v = unit(left.float()), unit(right.float())
    mean, variance = negative_statistics(u, v)
    numbers: dict[str, Tensor | float] = {
        "train/negative_mean": mean,
        "train/negative_variance": variance,
        "train/alignment": alignment(left, right),
        "train/uniformity": uniformity(left),
        "train/rankme": rankme(left),
        "train/rankme_unit": rankme(u),
        "train/temperature": objective.temperature,
        "train/scale_ratio": objective.ratio,
    }
    for side, x in (("left", left), ("right", right)):
        for name, value in norm_statistics(x).items():
            numbers[f"train/norm_{side}_{name}"] = value
    # The temperature that a row's unit vectors would need for the same logits.
    exponents = [torch.as_tensor(g, device=left.device) for g in objective.cell.exponents]
    shrunk = left.norm(dim=1).mean() ** (1 - exponents[0])
    shrunk = shrunk * right.norm(dim=1).mean() ** (1 - exponents[1])
    numbers["train/effective_temperature"] = objective.temperature / shrunk
    numbers["train/exponent_left"], numbers["train/exponent_right"] = exponents
    return {name: float(value) for name, value in numbers.items()}
