"""Cell + loss + temperature + variance term -> named losses. The one thing that trains."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offsphere import losses
from offsphere.cells import ROUNDED_UP, Cell, calibration_ratio, shrink
from offsphere.names import (
    DIRECTIONS,
    FALSE_NEGATIVES,
    LARGEST_SCALE,
    LOSS_PRECISIONS,
    LOSSES,
    SCALES,
    VARIANCE_ON,
    unknown,
)
from offsphere.precision import at_least_float32
from offsphere.split import Split
from offsphere.streamed import bad_temperature
from offsphere.variance import negative_variance, spread_out

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SIGLIP_BIAS = -10.0


class Objective(nn.Module):
    """The training objective on raw embeddings of both sides.

    With `scale="calibrated"` the first training batch sets r, the cell's within-row spread of
    scores over cosine's, and the cell's temperature is r times the given one: every cell starts
    with cosine's logit spread. `scale="fixed"` is r = 1, the papers' own protocol.
    `population` is the size of the training set, on which the variance term's target depends.
    `within_view` adds each side's own other rows as negatives (info_nce and siglip).
    `batch_mean_norm` first divides each side by the batch's mean norm: a control arm, in which
    norms still differ within a batch but their overall scale cannot act as a temperature.
    `gor_weight` adds GOR (`variance.spread_out`), the variance term's deployed rival: each side
    spread out by itself, the mean of both; with a queue, queries against the queue.
    `false_negatives` says what rows of one id (`ids` of a call) are to each other in info_nce; the
    two terms and the calibration take no notice of it.
    `negatives` divides the batch, by the order of its rows, into groups of so many: a row meets
    only its own group, in the loss, both terms and the calibration. So the number of
    negatives is a treatment apart from the batch size, on which noise and batch-norm depend.
    """

    ratio: Tensor

    def __init__(
        self,
        cell: Cell | str = "cosine",
        loss: str = "nt_xent",
        *,
        population: int,
        temperature: float = 0.2,
        learnable_temperature: bool = False,
        scale: str = "calibrated",
        direction: str = "both",
        within_view: bool = False,
        batch_mean_norm: bool = False,
        variance_weight: float = 0.0,
        variance_on: str = "cosine",
        gor_weight: float = 0.0,
        negatives: int | None = None,
        false_negatives: str = "keep",
        loss_precision: str = "tf32",
    ) -> None:
        super().__init__()
        for what, got, expected in (
            ("loss", loss, LOSSES),
            ("scale", scale, SCALES),
            ("direction", direction, DIRECTIONS),
            ("variance_on", variance_on, VARIANCE_ON),
            ("false_negatives", false_negatives, FALSE_NEGATIVES),
            ("loss_precision", loss_precision, LOSS_PRECISIONS),
        ):
            if got not in expected:
                raise unknown(what, got, expected)
        _check_numbers(population, temperature, learnable_temperature, variance_weight, gor_weight)
        row = LOSSES[loss]
        if within_view and not row.within_view:
            can = " or ".join(name for name, other in LOSSES.items() if other.within_view)
            raise ValueError(
                f"Expected within_view with {can}, got {loss}: nt_xent, dcl and dhel "
                "have within-view negatives of their own, the others have none."
            )
        if negatives is not None and (negatives < 2 or row.form == "queue"):
            raise ValueError(
                f"Expected groups of at least 2 negatives inside a batch, got {negatives} for "
                f"{loss}. (moco_nce has its negatives from the queue: change its size.)"
            )
        if false_negatives != "keep" and (not row.directed or within_view or negatives is not None):
            raise ValueError(
                f"Expected false_negatives={false_negatives} with info_nce, without within_view "
                f"and groups of negatives; got {loss}."
            )
        self.cell = Cell(cell) if isinstance(cell, str) else cell
        self.split = Split(precision=loss_precision)
        """The ranks that share the loss; each gives it the rows of all."""
        self.loss, self.row = loss, row
        self.negatives = negatives
        self.false_negatives = false_negatives
        self.population = population
        self.direction = direction
        self.within_view = within_view
        self.batch_mean_norm = batch_mean_norm
        self.variance_weight = variance_weight
        self.variance_on = variance_on
        self.gor_weight = gor_weight
        log_scale = torch.tensor(-math.log(temperature))
        if learnable_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        if row.bias:
            self.bias = nn.Parameter(torch.tensor(SIGLIP_BIAS))
        # NaN until the first training batch has set it.
        self.register_buffer("ratio", torch.tensor(1.0 if scale == "fixed" else math.nan))
        self._calibrated = scale == "fixed"
        self._largest = math.inf
        """A bound of the scores' size, where the host knows it."""
        if self._calibrated:
            self._bound_scores()
        self.register_load_state_dict_post_hook(_forget_calibration)

    @property
    def temperature(self) -> Float[Tensor, ""]:
        """What divides the scores: r times the given or learned temperature."""
        return self.ratio * torch.exp(-self.log_scale)

    @property
    def _function(self) -> Callable[..., Tensor]:
        """The loss is the function of its name, its within-view form that of NAME_within."""
        return getattr(losses, f"{self.loss}_within" if self.within_view else self.loss)

    def _known(self, split: Split) -> dict[str, Any]:
        """What a loss is told of its scores and of ranks, if it asks.

        One that does not ask for ranks is whole on each, which is right.
        """
        known = {"largest": self._largest, "split": split}
        return {name: x for name, x in known.items() if name in _parameters(self._function)}

    def forward(
        self,
        left: Float[Tensor, "n d"],
        right: Float[Tensor, "n d"],
        *,
        queue: Float[Tensor, "k d"] | None = None,
        hard_negatives: Float[Tensor, "k d"] | None = None,
        ids: Int[Tensor, " columns"] | None = None,
    ) -> dict[str, Tensor]:
        """The named losses of raw embeddings; `loss` is the one to differentiate."""
        if (queue is None) == (self.row.form == "queue"):
            wanted = "a queue" if queue is None else "no queue"
            raise ValueError(f"Expected {wanted} for the loss {self.loss}.")
        if hard_negatives is not None and not self.row.directed:
            raise ValueError(
                f"Expected hard_negatives for info_nce only, got them for {self.loss}."
            )
        if hard_negatives is not None and self.within_view:
            raise ValueError("Expected no hard_negatives together with within_view.")
        if ids is None and self.false_negatives != "keep":
            raise ValueError(f"Expected ids for false_negatives={self.false_negatives}, got none.")
        self._check(left, right, queue, hard_negatives)
        left, right = at_least_float32(left), at_least_float32(right)
        queue = None if queue is None else at_least_float32(queue)
        group = self._group(len(left), hard_negatives)
        if self.batch_mean_norm:
            left, right, queue, hard_negatives = self._on_one_scale(
                left, right, queue, hard_negatives
            )
        self._start(left, right, group)
        contrastive, u, v = self._contrast(left, right, queue, hard_negatives, group, ids)
        if self.variance_on == "cosine":
            u, v = shrink(left, 1.0), shrink(right if queue is None else queue, 1.0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.variance_weight > 0):
            variance = negative_variance(
                u, v, self.population, paired=queue is None, group=group, split=self.split
            )
        total = (
            contrastive + self.variance_weight * variance if self.variance_weight else contrastive
        )
        named = {"loss": total, "contrastive": contrastive, "variance": variance}
        if self.gor_weight:
            named["gor"] = self._gor(left, right, queue, group)
            named["loss"] = total + self.gor_weight * named["gor"]
        return named

    def _check(
        self, left: Tensor, right: Tensor, queue: Tensor | None, hard_negatives: Tensor | None
    ) -> None:
        losses.check_sides(left, right, *(x for x in (queue, hard_negatives) if x is not None))
        if not len(left):
            raise ValueError("Expected at least one pair, got an empty batch.")
        if self.row.form == "views" and len(left) != len(right):
            raise ValueError(
                f"Expected two views of as many rows, got {len(left)} and {len(right)}: row i of "
                "one belongs to row i of the other."
            )

    def _gor(self, left: Tensor, right: Tensor, queue: Tensor | None, group: int | None) -> Tensor:
        """GOR on cosines, whatever the cell."""
        u, v = (shrink(x, 1.0) for x in (left, right if queue is None else queue))
        if queue is not None:
            return spread_out(u, v, paired=False, split=self.split)
        one, other = (spread_out(x, x, group=group, split=self.split) for x in (u, v))
        return (one + other) / 2

    def _group(self, rows: int, hard_negatives: Tensor | None) -> int | None:
        """The rows of a group; None if the whole batch is one."""
        if self.negatives is None or self.negatives == rows:
            return None
        if hard_negatives is not None:
            raise ValueError(
                "Expected no hard_negatives together with groups: every row would see those of all."
            )
        if rows % self.negatives:
            raise ValueError(
                f"Expected a batch that groups of {self.negatives} fill, got {rows} rows."
            )
        return self.negatives

    def _contrast(
        self,
        left: Tensor,
        right: Tensor,
        queue: Tensor | None,
        hard_negatives: Tensor | None,
        group: int | None,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The contrastive loss, and two sides whose products are the negatives' scores over r."""
        temperature, alone = self.temperature, Split(precision=self.split.precision)
        if self.row.form == "views":
            stacked = torch.cat([left, right])
            rows, candidates = self.cell(stacked, stacked)

            def views(a: Tensor, b: Tensor, split: Split = alone) -> Tensor:
                return self._function(a, b, temperature, **self._known(split))

            value = (
                views(rows, candidates, self.split)
                if group is None
                else losses.in_groups(
                    views, rows, candidates, group, stacked=True, split=self.split
                )
            )
            return value, rows[: len(left)] / self.ratio, candidates[len(left) :]
        left, right = self.cell(left, right)
        scaled = left / self.ratio
        if queue is not None:
            queue = self.cell.shrink_right(queue)
            value = self._function(left, right, queue, temperature, **self._known(self.split))
            return value, scaled, queue
        if self.loss == "spectral":  # Gram matrices of groups need no blocks of scores
            value = losses.spectral(left / temperature, right, group=group, split=self.split)
            return value, scaled, right
        if group is None:
            value = self._pairs(left, right, temperature, hard_negatives, self.split, ids)
            return value, scaled, right

        def pairs(a: Tensor, b: Tensor) -> Tensor:
            return self._pairs(a, b, temperature, None, alone)

        return losses.in_groups(pairs, left, right, group, split=self.split), scaled, right

    def _pairs(
        self,
        left: Tensor,
        right: Tensor,
        temperature: Tensor,
        hard_negatives: Tensor | None,
        split: Split,
        ids: Tensor | None = None,
    ) -> Tensor:
        """A loss of aligned pairs, as the settings want it, on sides that the cell has shrunk."""
        known = self._known(split)
        if self.row.bias:
            return self._function(left, right, temperature, self.bias, **known)
        if not self.row.directed:
            return self._function(left, right, temperature, **known)
        known |= {"both_ways": self.direction == "both"}
        if self.false_negatives != "keep":
            known |= {"ids": ids, "false_negatives": self.false_negatives}
        if self.direction == "right_to_left":
            left, right = right, left
        if hard_negatives is None:
            return self._function(left, right, temperature, **known)
        if self.direction == "right_to_left":
            raise ValueError("Expected no hard_negatives for right_to_left: they are right rows.")
        hard_negatives = self.cell.shrink_right(hard_negatives)
        return self._function(left, right, temperature, hard_negatives=hard_negatives, **known)

    def _on_one_scale(
        self, left: Tensor, right: Tensor, queue: Tensor | None, hard_negatives: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Each side over its batch's mean norm; interchangeable views share one mean."""
        left_mean, right_mean = (x.norm(dim=1).mean() for x in (left, right))
        if self.row.form == "views":
            left_mean = right_mean = (left_mean + right_mean) / 2
        if queue is not None:
            right_mean = queue.norm(dim=1).mean()
        rest = [None if x is None else x / right_mean for x in (queue, hard_negatives)]
        return left / left_mean, right / right_mean, rest[0], rest[1]

    @torch.no_grad()
    def _start(self, left: Tensor, right: Tensor, group: int | None) -> None:
        """Calibrate on the first training batch; keep a learnable scale in its range.

        With a queue too: a new one holds random directions, later it holds such keys as `right`.
        """
        if isinstance(self.log_scale, nn.Parameter):
            self.log_scale.clamp_(0.0, math.log(LARGEST_SCALE))
        if self._calibrated:
            return
        if self.ratio.isnan():
            if not self.training:
                raise ValueError(
                    "Expected a calibrated objective, got one before its first training batch. "
                    "Call it once in training mode, load a checkpoint, or use scale=fixed."
                )
            n = group or len(left)
            groups = len(left) // n
            if self.row.form == "views":
                pairs = zip(left.split(n), right.split(n), strict=True)
                stacked = torch.cat([view for pair in pairs for view in pair])
                exclude = (0, n, -n)
                ratio = calibration_ratio(
                    self.cell, stacked, stacked, exclude=exclude, groups=groups
                )
            else:
                ratio = calibration_ratio(self.cell, left, right, groups=groups)
            self.ratio.copy_(ratio)
        self._calibrated = True
        self._bound_scores()

    def _bound_scores(self) -> None:
        """Rows of the cosine cell have length one; asked once, as it waits for the device."""
        known = self.cell.name == "cosine" and not isinstance(self.log_scale, nn.Parameter)
        self._largest = ROUNDED_UP / self.temperature.item() if known else math.inf


@cache
def _parameters(function: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _forget_calibration(objective: Objective, _keys: object) -> None:
    """A loaded ratio may be NaN (never calibrated): look again at the next batch."""
    objective._calibrated = False


def _check_numbers(
    population: int, temperature: float, learnable: bool, variance_weight: float, gor_weight: float
) -> None:
    if population < 2:
        raise ValueError(
            f"Expected a population of at least 2, got {population}. Pass the training-set size."
        )
    if not 0 < temperature < math.inf:
        raise bad_temperature(temperature)
    if learnable and not 1 / LARGEST_SCALE <= temperature <= 1:
        raise ValueError(
            f"Expected a learnable temperature to start in [{1 / LARGEST_SCALE:g}, 1], "
            f"got {temperature}. Choose one in range, or keep it fixed."
        )
    for name, weight in (("variance_weight", variance_weight), ("gor_weight", gor_weight)):
        if not 0 <= weight < math.inf:
            raise ValueError(f"Expected a {name} of at least 0, got {weight}.")
