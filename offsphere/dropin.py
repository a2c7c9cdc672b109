"""Losses with the call signatures of open_clip and lightly, plus `cell=` and the two terms.

Change one import in an existing script:

    from open_clip.loss import ClipLoss      ->  from offsphere.dropin import ClipLoss
    from lightly.loss import NTXentLoss      ->  from offsphere.dropin import NTXentLoss

Feed them raw embeddings: a cell other than cosine has nothing to work with once a model has
normalised its output (open_clip: `model.encode_image(x, normalize=False)`). On several processes
the features of all ranks are gathered with their gradients, so that gradients averaged by DDP are
those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offsphere import losses
from offsphere.cells import Cell, shrink
from offsphere.variance import negative_variance, spread_out

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["ClipLoss", "DCLLoss", "NTXentLoss", "SigLipLoss"]


class _DropIn(nn.Module):
    """What the four share: the cell, the variance term, GOR and the gathering of ranks."""

    def __init__(
        self,
        gather: bool,
        cell: str | Cell,
        variance_weight: float,
        population: int | None,
        gor_weight: float,
    ) -> None:
        super().__init__()
        if gor_weight < 0:
            raise ValueError(f"Expected a gor_weight of at least 0, got {gor_weight}.")
        if variance_weight < 0:
            raise ValueError(f"Expected a variance_weight of at least 0, got {variance_weight}.")
        if variance_weight and population is None:
            raise ValueError(
                f"variance_weight={variance_weight} needs population=, the number of training "
                "instances: the term's target is -1/(population - 1)."
            )
        self.cell = Cell(cell) if isinstance(cell, str) else cell
        self.gather = gather
        self.variance_weight = variance_weight
        self.population = population
        self.gor_weight = gor_weight

    def _gathered(self, *sides: Tensor) -> tuple[Tensor, ...]:
        return tuple(gather_with_gradient(x) for x in sides) if self.gather else sides

    def _variance(self, left: Tensor, right: Tensor) -> Tensor | float:
        """The weighted variance term on cosines."""
        if not self.variance_weight or self.population is None:
            return 0.0
        u, v = shrink(left, 1.0), shrink(right, 1.0)
        return self.variance_weight * negative_variance(u, v, self.population)

    def _gor(self, left: Tensor, right: Tensor) -> Tensor | float:
        """The weighted GOR on cosines: each side spread out by itself, the mean of both."""
        if not self.gor_weight:
            return 0.0
        u, v = shrink(left, 1.0), shrink(right, 1.0)
        return self.gor_weight * (spread_out(u, u) + spread_out(v, v)) / 2


class ClipLoss(_DropIn):
    """`open_clip.loss.ClipLoss` with a cell. `local_loss` and `gather_with_grad` change nothing:
    the gradients are those of the whole batch in any case."""

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        cell: str | Cell = "cosine",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
    ) -> None:
        _refuse_horovod(use_horovod)
        super().__init__(world_size > 1, cell, variance_weight, population, gor_weight)

    def forward(
        self,
        image_features: Float[Tensor, "n d"],
        text_features: Float[Tensor, "n d"],
        logit_scale: float | Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ):
        """A bias shifts all logits alike, which this loss cannot see."""
        image, text = self._gathered(image_features, text_features)
        left, right = self.cell(image, text)
        loss = losses.info_nce(left, right, 1 / logit_scale)
        return _named(loss, self._variance(image, text), self._gor(image, text), output_dict)


class SigLipLoss(_DropIn):
    """`open_clip.loss.SigLipLoss` with a cell."""

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        *,
        cell: str | Cell = "cosine",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
    ) -> None:
        super().__init__(world_size > 1, cell, variance_weight, population, gor_weight)

    def forward(
        self,
        image_features: Float[Tensor, "n d"],
        text_features: Float[Tensor, "n d"],
        logit_scale: float | Tensor,
        logit_bias: float | Tensor,
        output_dict: bool = False,
    ):
        image, text = self._gathered(image_features, text_features)
        left, right = self.cell(image, text)
        loss = losses.siglip(left, right, 1 / logit_scale, logit_bias)
        return _named(loss, self._variance(image, text), self._gor(image, text), output_dict)


class NTXentLoss(_DropIn):
    """`lightly.loss.NTXentLoss` with a cell."""

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | tuple[int, int] = 0,
        gather_distributed: bool = False,
        *,
        cell: str | Cell = "cosine",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
    ) -> None:
        bank = memory_bank_size if isinstance(memory_bank_size, int) else memory_bank_size[0]
        if bank:
            raise ValueError(
                f"Expected memory_bank_size=0, got {memory_bank_size}. Keep the bank as an "
                "offsphere.momentum.Queue of raw keys and call offsphere.losses.moco_nce."
            )
        super().__init__(gather_distributed, cell, variance_weight, population, gor_weight)
        self.temperature = temperature

    def forward(self, out0: Float[Tensor, "n d"], out1: Float[Tensor, "n d"]) -> Tensor:
        out0, out1 = self._gathered(out0, out1)
        stacked = torch.cat([out0, out1])
        left, right = self.cell(stacked, stacked)
        loss = losses.nt_xent(left, right, self.temperature)
        return loss + self._variance(out0, out1) + self._gor(out0, out1)


class DCLLoss(_DropIn):
    """`lightly.loss.DCLLoss` with a cell; `weight_fn(out0, out1)` weighs the positives (DCLW)."""

    def __init__(
        self,
        temperature: float = 0.1,
        weight_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        gather_distributed: bool = False,
        *,
        cell: str | Cell = "cosine",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
    ) -> None:
        super().__init__(gather_distributed, cell, variance_weight, population, gor_weight)
        self.temperature = temperature
        self.weight_fn = weight_fn

    def forward(self, out0: Float[Tensor, "n d"], out1: Float[Tensor, "n d"]) -> Tensor:
        out0, out1 = self._gathered(out0, out1)
        stacked = torch.cat([out0, out1])
        left, right = self.cell(stacked, stacked)
        loss = losses.dcl(left, right, self.temperature)
        if self.weight_fn is not None:
            n = len(out0)
            weight = torch.cat(
                [self.weight_fn(left[:n], left[n:]), self.weight_fn(left[n:], left[:n])]
            )
            positive = torch.linalg.vecdot(left, right.roll(n, 0)) / self.temperature
            loss = loss + ((1 - weight) * positive).mean()
        return loss + self._variance(out0, out1) + self._gor(out0, out1)


def gather_with_gradient(x: Float[Tensor, "n d"]) -> Float[Tensor, "w*n d"]:
    """The rows of all ranks, in rank order; each rank's gradient flows back to where it belongs."""
    if not dist.is_initialized():
        raise ValueError(
            "Expected an initialised process group, because gathering was asked for. Call "
            "torch.distributed.init_process_group first, or use one process."
        )
    from torch.distributed.nn.functional import all_gather

    return torch.cat(list(all_gather(x)))


def _named(loss: Tensor, variance: Tensor | float, gor: Tensor | float, output_dict: bool):
    """open_clip's two forms: the sum, or a dict whose values its trainer adds up."""
    if not output_dict:
        return loss + variance + gor
    terms = {"variance_loss": variance, "gor_loss": gor}
    return {"contrastive_loss": loss} | {
        name: term for name, term in terms.items() if isinstance(term, Tensor)
    }


def _refuse_horovod(use_horovod: bool) -> None:
    if use_horovod:
        raise ValueError("Expected use_horovod=False: use torch.distributed instead.")
