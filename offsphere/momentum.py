"""Momentum contrast's two parts: an averaged twin of an encoder, and a queue of raw keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from offsphere.names import unknown

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["MomentumTwin", "Queue", "encode_without_leak", "momentum_at"]

MOMENTUM_SCHEDULES = ("constant", "cosine")


def momentum_at(momentum: float, schedule: str, progress: float) -> float:
    """The momentum when `progress` (0 to 1) of training is done; 'cosine' rises from it to 1."""
    if schedule not in MOMENTUM_SCHEDULES:
        raise unknown("momentum schedule", schedule, MOMENTUM_SCHEDULES)
    if schedule == "constant":
        return momentum
    return 1 - (1 - momentum) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


class MomentumTwin(nn.Module):
    """A copy of `source`, without gradients, that follows it as an exponential moving average.

    Running statistics of batch-norm are averaged with the same momentum as the weights, so that
    weights and statistics look back equally far; a twin that runs in training mode writes its own
    statistics too, and those dominate. Integer buffers are copied. All of it is in the state dict.
    """

    def __init__(self, source: nn.Module, momentum: float, schedule: str = "constant") -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"The momentum must lie in 0 to 1, got {momentum}; MoCo uses 0.999.")
        momentum_at(momentum, schedule, 0.0)
        self.momentum, self.schedule = momentum, schedule
        self.module = copy.deepcopy(source).requires_grad_(False)
        # In a tuple: the source is no submodule, its weights belong to another state dict.
        self._source = (source,)

    @torch.no_grad()
    def forward(self, *inputs: Tensor) -> Any:
        """The averaged module's output."""
        return self.module(*inputs)

    @torch.no_grad()
    def update(self, progress: float = 0.0) -> float:
        """Move one step towards the source; returns the momentum at this `progress` of training."""
        momentum = momentum_at(self.momentum, self.schedule, progress)
        (source,) = self._source
        pairs = list(zip(_state(self.module), _state(source), strict=True))
        averaged = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
        mine, theirs = (list(side) for side in zip(*averaged, strict=True))
        torch._foreach_lerp_(mine, theirs, 1 - momentum)
        for mine, theirs in pairs:
            if not mine.is_floating_point():
                mine.copy_(theirs)
        return momentum

    def extra_repr(self) -> str:
        return f"momentum={self.momentum:g}, schedule={self.schedule}"


class Queue(nn.Module):
    """The last `size` keys, raw, in a ring; rows, pointer and count are in the state dict."""

    rows: Float[Tensor, "size dim"]
    pointer: Tensor
    """Where the next key goes."""
    filled: Tensor
    """How many rows are valid."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"A queue needs at least one row and one column, got {size} x {dim}.")
        self.register_buffer("rows", torch.zeros(size, dim))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    @property
    def keys(self) -> Float[Tensor, "filled dim"]:
        """The valid rows (a view, in ring order): clone it if it must outlive the next enqueue."""
        return self.rows[: int(self.filled)]

    @torch.no_grad()
    def enqueue(self, keys: Float[Tensor, "n dim"]) -> None:
        """Write the keys over the oldest rows; of more keys than rows the newest stay."""
        self._check(keys)
        size, count = len(self.rows), len(keys)
        kept = keys[-size:].to(self.rows)
        start = self.pointer + (count - len(kept))
        oldest = (start + torch.arange(len(kept), device=self.rows.device)) % size
        self.rows.index_copy_(0, oldest, kept)
        self.pointer.add_(count).remainder_(size)
        self.filled.add_(count).clamp_(max=size)

    @torch.no_grad()
    def initialise(
        self, keys: Float[Tensor, "n dim"], generator: torch.Generator
    ) -> Literal["encoded", "random"]:
        """Fill the queue at the encoder's own scale and say with what.

        'encoded': the newest of `keys`, if there are enough for every row; otherwise 'random':
        uniform directions with norms drawn from those of `keys`. The generator is a CPU one.
        """
        self._check(keys)
        size, dim = self.rows.shape
        self.pointer.zero_()
        self.filled.fill_(size)
        if len(keys) >= size:
            self.rows.copy_(keys[-size:])
            return "encoded"
        norms = torch.linalg.vector_norm(keys.float(), dim=1)
        drawn = norms[torch.randint(len(keys), (size,), generator=generator).to(norms.device)]
        directions = nn.functional.normalize(torch.randn(size, dim, generator=generator), dim=1)
        self.rows.copy_(directions.to(drawn.device) * drawn[:, None])
        return "random"

    def extra_repr(self) -> str:
        return f"size={self.rows.shape[0]}, dim={self.rows.shape[1]}"

    def _check(self, keys: Tensor) -> None:
        if keys.ndim != 2 or keys.shape[1] != self.rows.shape[1] or len(keys) == 0:
            raise ValueError(
                f"Expected at least one key of {self.rows.shape[1]} numbers each, got a tensor of "
                f"shape {tuple(keys.shape)}. Give Queue(size, dim) the encoder's embedding_dim."
            )


def encode_without_leak(
    encoder: Callable[[Tensor], tuple[Tensor, ...]],
    images: Float[Tensor, "n 3 h w"],
    groups: int,
    generator: torch.Generator,
) -> tuple[Tensor, ...]:
    """The encoder's outputs, where batch-norm saw the images in `groups` shuffled sub-batches.

    Batch-norm shares its statistics among the images of a batch; if a query and its key are encoded
    in the same company, that company gives the answer away. MoCo shuffles keys across GPUs; this is
    the same on one device. Encoders with norm='group' have nothing to leak: call them directly.
    """
    count = len(images)
    if groups < 1 or (groups > 1 and count < 2 * groups):
        raise ValueError(
            "Expected at least 1 group, and of several at least 2 images in each, because "
            f"batch-norm needs company, got {groups} groups of {count} images. Use fewer groups or "
            "a larger batch."
        )
    order = torch.randperm(count, generator=generator).to(images.device)
    parts = [encoder(images[chosen]) for chosen in order.tensor_split(groups)]
    back = torch.argsort(order)
    return tuple(torch.cat(output)[back] for output in zip(*parts, strict=True))


def _state(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, in the module's order."""
    return [*module.parameters(), *module.buffers()]
