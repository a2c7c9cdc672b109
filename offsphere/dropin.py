"""Losses with the call signatures of open_clip and lightly, plus `cell=` and the two terms.

Change one import in an existing script:

    from open_clip.loss import ClipLoss      ->  from offsphere.dropin import ClipLoss
    from lightly.loss import NTXentLoss      ->  from offsphere.dropin import NTXentLoss

Feed them raw embeddings: a cell other than cosine has nothing to work with once a model has
normalised its output (open_clip: `model.encode_image(x, normalize=False)`). On several processes
the features of all ranks are gathered with their gradients, and each rank computes its share of the
loss (`offsphere.split`): gradients averaged by DDP are those of the whole batch.

`scale="calibrated"` lets the first training batch multiply the temperature by the cell's spread of
scores over cosine's, as in `offsphere.objective`. `cell="learnable"` learns only if an optimizer
has its exponents:

    loss = ClipLoss(cell="learnable")
    optimizer.add_param_group({"params": loss.parameters(), "weight_decay": 0.0})
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offsphere import losses
from offsphere.cells import ROUNDED_UP, Cell, calibrate, shrink
from offsphere.momentum import Queue
from offsphere.names import LOSS_PRECISIONS, SCALES, unknown
from offsphere.precision import (
    at_least_float32,
    compiling,
    eagerly,
    row_products,
    transformed,
)
from offsphere.split import Split, gather_with_gradient, process_count
from offsphere.streamed import bad_temperature
from offsphere.variance import negative_variance, spread_out

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["ClipLoss", "DCLLoss", "NTXentLoss", "SigLipLoss"]

UNIT = 0.01
"""Rows this near to length one count as normalised: bfloat16 rounds a norm by less."""
DIST_IMPLS = ("bidir", "shift", "reduce", "gather")
PATIENCE = 100
"""Training calls after which exponents that nothing has changed belong to no optimizer."""


class DropIn(nn.Module):
    """What the four share: the cell, its scale, the variance term, GOR, the gathering of ranks."""

    ratio: Tensor

    def __init__(
        self,
        cell: str | Cell,
        variance_weight: float,
        population: int | None,
        gor_weight: float,
        scale: str,
        loss_precision: str,
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
        if scale not in SCALES:
            raise unknown("scale", scale, SCALES)
        if loss_precision not in LOSS_PRECISIONS:
            raise unknown("loss_precision", loss_precision, LOSS_PRECISIONS)
        self.cell = Cell(cell) if isinstance(cell, str) else cell
        self.variance_weight = variance_weight
        self.population = population
        self.gor_weight = gor_weight
        self.scale = scale
        if scale == "calibrated":
            # NaN until the first training batch has set it; with scale=fixed no state is kept.
            self.register_buffer("ratio", torch.tensor(math.nan))
        self._ready = self._bank_scaled = False
        self._host_ratio = 1.0 if scale == "fixed" else math.nan
        self._calls, self._version = 0, -1
        self._alone = self._split = Split(precision=loss_precision)
        self._local = False
        self.register_load_state_dict_post_hook(_look_again)

    def _sides(self, left: Tensor, right: Tensor, gather: bool) -> list[Tensor]:
        """Both sides, checked, in float32 or better, of all ranks if they are gathered."""
        losses.check_sides(left, right)
        if len(left) != len(right):
            raise ValueError(
                f"Expected as many rows on both sides, got {len(left)} and {len(right)}: row i of "
                "one belongs to row i of the other."
            )
        if not len(left):
            raise ValueError("Expected at least one pair, got an empty batch.")
        sides = [at_least_float32(x) for x in (left, right)]
        if not gather:
            self._split = self._alone
            return sides
        gathered = [eagerly(gather_with_gradient, x) for x in sides]
        place = dist.get_rank(), dist.get_world_size()
        self._split = Split(*place, local=self._local, precision=self._alone.precision)
        return gathered

    def _temperature(
        self, given: float | Tensor, left: Tensor, right: Tensor, exclude: tuple[int, ...] = (0,)
    ) -> float | Tensor:
        """The given temperature, times the cell's ratio if it is calibrated."""
        self._watch(left, right)
        if self.scale == "fixed":
            return given
        if not self._ready:
            calibrate(self.ratio, self.cell, left, right, exclude, training=self.training)
            if not compiling():
                self._host_ratio = self.ratio.item()
            self._ready = True
        return self.ratio.to(left.device) * given

    def _watch(self, left: Tensor, right: Tensor) -> None:
        """Warn once of rows that were normalised before, and of exponents that nothing trains.

        Only the first call looks at the rows: later an accelerator would have to be waited for.
        """
        if transformed() or compiling() or not (self.training and torch.is_grad_enabled()):
            return
        self._calls += 1
        if self._calls == 1:
            _warn_of_unit_rows(self.cell, left, right)
        if self.cell.name != "learnable":
            return
        # An optimizer writes in place, which torch counts.
        if self._calls == 1:
            self._version = self.cell.logits._version
        elif self._calls == PATIENCE and self.cell.logits._version == self._version:
            warnings.warn(
                f"The exponents of cell='learnable' have not changed in {PATIENCE} calls: no "
                "optimizer has them. Add them to yours: "
                "optimizer.add_param_group({'params': loss.parameters(), 'weight_decay': 0.0}).",
                stacklevel=6,
            )

    def _largest(self, scale: float | Tensor) -> float:
        """A bound of the scores' size: known of unit rows if what multiplies them is a number."""
        if self.cell.name != "cosine" or isinstance(scale, Tensor):
            return math.inf
        return ROUNDED_UP * scale / self._host_ratio

    def _variance(self, left: Tensor, right: Tensor, paired: bool = True) -> Tensor | float:
        """The weighted variance term on cosines."""
        if not self.variance_weight or self.population is None or _alone(left, paired):
            return 0.0
        u, v = shrink(left, 1.0), shrink(right, 1.0)
        return self.variance_weight * negative_variance(
            u, v, self.population, paired=paired, split=self._split
        )

    def _gor(self, left: Tensor, right: Tensor, paired: bool = True) -> Tensor | float:
        """The weighted GOR on cosines: each side spread out by itself, the mean of both.

        With a bank (not `paired`) it is that of queries against the bank.
        """
        if not self.gor_weight or _alone(left, paired):
            return 0.0
        u, v = shrink(left, 1.0), shrink(right, 1.0)
        if not paired:
            return self.gor_weight * spread_out(u, v, paired=False)
        one, other = (spread_out(x, x, split=self._split) for x in (u, v))
        return self.gor_weight * (one + other) / 2


class ClipLoss(DropIn):
    """`open_clip.loss.ClipLoss` with a cell.

    With `local_loss` the value is that of this rank's rows, as in open_clip; without it, of the
    whole batch. Each rank computes its share, and the gradients are those of the whole batch, in
    any case: `gather_with_grad` changes nothing. No labels are made, so none are cached.
    """

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
        scale: str = "fixed",
        loss_precision: str = "tf32",
    ) -> None:
        _refuse_horovod(use_horovod)
        super().__init__(cell, variance_weight, population, gor_weight, scale, loss_precision)
        self.local_loss = self._local = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod
        self.prev_num_logits = 0
        self.labels: dict[torch.device, Tensor] = {}

    def forward(
        self,
        image_features: Float[Tensor, "n d"],
        text_features: Float[Tensor, "n d"],
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ):
        """A bias shifts all logits alike: the loss does not change, and its gradient is zero."""
        image, text = self._sides(image_features, text_features, self.world_size > 1)
        given = _temperature_of(logit_scale, image)
        unseen = 0.0 if logit_bias is None else 0.0 * losses.one_value(logit_bias, "bias", image)
        if len(image) == 1:
            loss = nothing(image, text) + 0.0 * given
        else:
            temperature = self._temperature(given, image, text)
            left, right = self.cell(image, text)
            largest = self._largest(logit_scale)
            loss = losses.info_nce(left, right, temperature, largest=largest, split=self._split)
        variance, gor = self._variance(image, text), self._gor(image, text)
        return _named(loss + unseen, variance, gor, output_dict)


class SigLipLoss(DropIn):
    """`open_clip.loss.SigLipLoss` with a cell. `dist_impl` and `chunk_size` change nothing: ranks
    are gathered, and scores come in blocks of the loss's own, whatever the batch."""

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
        *,
        cell: str | Cell = "cosine",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
        scale: str = "fixed",
        loss_precision: str = "tf32",
    ) -> None:
        super().__init__(cell, variance_weight, population, gor_weight, scale, loss_precision)
        if dist_impl and dist_impl not in DIST_IMPLS:
            raise unknown("dist_impl", dist_impl, DIST_IMPLS)
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl or "bidir"
        self.chunk_size = chunk_size
        self.prev_num_logits = 0
        self.labels: dict[torch.device, Tensor] = {}

    def forward(
        self,
        image_features: Float[Tensor, "n d"],
        text_features: Float[Tensor, "n d"],
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
    ):
        logit_bias = 0.0 if logit_bias is None else logit_bias
        image, text = self._sides(image_features, text_features, self.world_size > 1)
        temperature = self._temperature(_temperature_of(logit_scale, image), image, text)
        left, right = self.cell(image, text)
        loss = losses.siglip(left, right, temperature, logit_bias, split=self._split)
        return _named(loss, self._variance(image, text), self._gor(image, text), output_dict)


class NTXentLoss(DropIn):
    """`lightly.loss.NTXentLoss` with a cell.

    The memory bank is a ring of the last raw keys, in the state dict, and starts, as lightly's,
    with random directions; their norms are those of the first keys.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        *,
        cell: str | Cell = "cosine",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
        scale: str = "fixed",
        loss_precision: str = "tf32",
    ) -> None:
        _check_lightly(temperature, gather_distributed)
        super().__init__(cell, variance_weight, population, gor_weight, scale, loss_precision)
        self.temperature = temperature
        self.gather_distributed = gather_distributed
        self.memory_bank = _bank(memory_bank_size)

    def forward(self, out0: Float[Tensor, "n d"], out1: Float[Tensor, "n d"]) -> Tensor:
        if self.memory_bank is not None:
            return self._against_bank(self.memory_bank, out0, out1)
        out0, out1 = self._sides(out0, out1, self.gather_distributed and process_count() > 1)
        if len(out0) == 1:
            return nothing(out0, out1)
        stacked, n = torch.cat([out0, out1]), len(out0)
        temperature = self._temperature(self.temperature, stacked, stacked, (0, n, -n))
        left, right = self.cell(stacked, stacked)
        largest = self._largest(1 / self.temperature)
        loss = losses.nt_xent(left, right, temperature, largest=largest, split=self._split)
        return loss + self._variance(out0, out1) + self._gor(out0, out1)

    def _against_bank(self, bank: Queue, out0: Tensor, out1: Tensor) -> Tensor:
        """Each row of out0 finds its key among the bank, which then takes the keys of all ranks.

        As lightly's, the bank stays as it is where there is nothing to train.
        """
        train = out0.requires_grad
        gather = self.gather_distributed and process_count() > 1
        out0, out1 = self._sides(out0, out1, gather=False)
        if not self._bank_scaled:
            norms = torch.linalg.vector_norm(out1.detach(), dim=1, keepdim=True).to(bank.rows)
            at = torch.arange(len(bank.rows), device=norms.device) % len(norms)
            bank.rows.mul_(torch.where(bank.filled > 0, 1.0, norms[at]))
            bank.filled.fill_(len(bank.rows))
            self._bank_scaled = True
        # A copy: the keys that are enqueued below are not this step's negatives.
        negatives = bank.rows.to(out0, copy=True)
        temperature = self._temperature(self.temperature, out0, out1)
        left, right = self.cell(out0, out1)
        queue = self.cell.shrink_right(negatives)
        largest = self._largest(1 / self.temperature)
        known = {"largest": largest, "split": self._alone}
        loss = losses.moco_nce(left, right, queue, temperature, **known)
        loss = loss + self._variance(out0, negatives, paired=False)
        loss = loss + self._gor(out0, negatives, paired=False)
        if train:
            bank.enqueue(eagerly(gather_with_gradient, out1.detach()) if gather else out1)
        return loss


class DCLLoss(DropIn):
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
        scale: str = "fixed",
        loss_precision: str = "tf32",
    ) -> None:
        _check_lightly(temperature, gather_distributed)
        super().__init__(cell, variance_weight, population, gor_weight, scale, loss_precision)
        self.temperature = temperature
        self.weight_fn = weight_fn
        self.gather_distributed = gather_distributed

    def forward(self, out0: Float[Tensor, "n d"], out1: Float[Tensor, "n d"]) -> Tensor:
        out0, out1 = self._sides(out0, out1, self.gather_distributed and process_count() > 1)
        stacked, n = torch.cat([out0, out1]), len(out0)
        if n == 1:
            raise ValueError(
                "Expected at least 2 pairs for DCL, whose sum without the positive is empty for "
                "one. Use drop_last=True in the loader."
            )
        temperature = self._temperature(self.temperature, stacked, stacked, (0, n, -n))
        left, right = self.cell(stacked, stacked)
        largest = self._largest(1 / self.temperature)
        loss = losses.dcl(left, right, temperature, largest=largest, split=self._split)
        if self.weight_fn is not None:
            weight = torch.cat(
                [self.weight_fn(left[:n], left[n:]), self.weight_fn(left[n:], left[:n])]
            )
            positive = row_products(left, right.roll(n, 0)) / temperature
            loss = loss + ((1 - weight) * positive).mean()
        return loss + self._variance(out0, out1) + self._gor(out0, out1)


def _temperature_of(logit_scale: float | Tensor, like: Tensor) -> Float[Tensor, ""]:
    scale = losses.one_value(logit_scale, "logit_scale", like)
    unseen = scale.device.type != "cpu" or compiling() or transformed()
    number = scale.item() if isinstance(logit_scale, Tensor) and not unseen else logit_scale
    if not (isinstance(number, Tensor) or 0 < number < math.inf):
        raise ValueError(
            f"Expected a logit_scale above 0, got {number:g}. It multiplies the scores: "
            "open_clip's models return model.logit_scale.exp()."
        )
    return scale.reciprocal()  # 1 / scale would be two kernels


def nothing(left: Tensor, right: Tensor) -> Tensor:
    """The loss of one pair, which has no negatives: zero, with gradients of zero."""
    return 0.0 * (left.sum() + right.sum())


def _alone(left: Tensor, paired: bool) -> bool:
    return paired and len(left) == 1


def _bank(size: int | Sequence[int]) -> Queue | None:
    """A bank of (rows, features) with random directions; none for 0 rows."""
    numbers = (size,) if isinstance(size, int) else tuple(size)
    if numbers == (0,):
        return None
    if len(numbers) != 2 or min(numbers) < 0:
        raise ValueError(
            f"Expected a memory_bank_size of 0 or (rows, features), got {size}. The features are "
            "those of the projections, for example (4096, 128)."
        )
    if not numbers[0]:
        return None
    bank = Queue(*numbers)
    bank.rows.copy_(nn.functional.normalize(torch.randn(numbers), dim=1))
    return bank


def _warn_of_unit_rows(cell: Cell, left: Tensor, right: Tensor) -> None:
    exponents = (0.5, 0.5) if cell.name == "learnable" else cell.exponents
    sides = zip(("left", "right"), exponents, (left, right), strict=True)
    unit = [name for name, exponent, x in sides if exponent != 1.0 and _is_unit(x)]
    if unit:
        warnings.warn(
            f"The cell {cell.name} keeps the magnitude of the {' and the '.join(unit)} side, but "
            "all rows there have length one: it can only act as if they were normalised. Feed raw "
            "embeddings (open_clip: model.encode_image(x, normalize=False); its trainer's model "
            "normalises).",
            stacklevel=7,
        )


def _is_unit(x: Tensor) -> bool:
    norms = torch.linalg.vector_norm(x.detach(), dim=1)
    return bool(((norms - 1).abs() < UNIT).all())


def _check_lightly(temperature: float, gather_distributed: bool) -> None:
    if not 0 < temperature < math.inf:
        raise bad_temperature(temperature)
    if gather_distributed and not dist.is_available():
        raise ValueError(
            "Expected torch.distributed for gather_distributed=True, but this torch has none. Use "
            "gather_distributed=False."
        )


def _look_again(loss: DropIn, _keys: object) -> None:
    """A loaded state may have been saved before its first batch."""
    loss._ready = loss._bank_scaled = False


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
