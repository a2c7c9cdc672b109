"""Interventions on embedding norms: cut-initialisation, gradient scaling and a norm penalty.

The first two are those of "On the Importance of Embedding Norms in Self-Supervised Learning"
(Draganov et al., ICML 2025); the penalty is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offsphere.cells import SMALLEST_NORM

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["cut_initialisation", "grad_scale", "norm_penalty"]


@torch.no_grad()
def cut_initialisation(module: nn.Module, c: float) -> None:
    """Divide every parameter by c in place, biases and batch-norm weights included, as the paper's
    code does; it recommends 3 for contrastive and 9 for non-contrastive methods."""
    if not 0 < c < float("inf"):
        raise ValueError(f"The cut of the initial weights must be above 0 (1 = off), got {c}.")
    for parameter in module.parameters():
        parameter.div_(c)


def grad_scale(x: Float[Tensor, "n d"], power: float) -> Float[Tensor, "n d"]:
    """x itself; backwards, the gradient of row i is multiplied by |x_i|**power.

    The gradient of a cosine shrinks with 1 / |x|: power 1 cancels that, 0 does nothing.
    """
    return x if power == 0 else _GradScale.apply(x, power)


def norm_penalty(x: Float[Tensor, "n d"], target: float | None = None) -> Float[Tensor, ""]:
    """mean(log(|x| / target)**2), in which twice and half the target are equally wrong (our own).

    Without a target it is the rows' own geometric mean: only the spread of the norms is penalised
    (for small spreads their squared CV), and their common scale stays free.
    """
    if target is not None and not target > 0:
        raise ValueError(f"The target norm must be above 0, got {target}.")
    log_norms = _row_norms(x).log()
    centre = log_norms.mean() if target is None else torch.log(log_norms.new_tensor(target))
    return (log_norms - centre).square().mean()


def penalised(
    losses: dict[str, Tensor], weight: float, *sides: Float[Tensor, "_ d"]
) -> dict[str, Tensor]:
    """The named losses with `weight` times the sides' mean norm penalty in `loss`; 0 is off."""
    if not weight:
        return losses
    penalty = torch.stack([norm_penalty(side) for side in sides]).mean()
    return {**losses, "loss": losses["loss"] + weight * penalty, "norm_penalty": penalty}


class _GradScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: float) -> Tensor:
        ctx.save_for_backward(_row_norms(x) ** power)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        (gradient,) = gradients
        return (gradient * factor[:, None]).to(gradient.dtype), None


def _row_norms(x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Norms in float32 or better, never exactly zero."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.linalg.vector_norm(x, dim=-1).clamp_min(SMALLEST_NORM)
