"""What a lane brings to a run: the method, its batches, and what is measured of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from offsphere.cells import Cell
from offsphere.objective import Objective
from offsphere.training.ranks import Rows, Tensors
from offsphere.training.settings import TrainSettings


class Step(NamedTuple):
    """What a method makes of one batch: named losses, and the raw embeddings of both sides."""

    losses: dict[str, Tensor]
    left: Tensor
    right: Tensor


class Method(nn.Module):
    """A trainable method: `method(batch, step)` is a `Step`, and it has an objective.

    Its four parts let a batch pass the towers in pieces, on one process or on many: `inputs`,
    `embed` and `constants` treat each row alone, `losses` sees the rows of the whole batch. With
    nothing but a `forward` it trains too, as long as its batches are not divided.
    """

    objective: Objective
    ragged: Collection[str] = ()
    """Names of embeddings and constants that do not have as many rows for each row of the batch."""

    def inputs(self, batch: Any, step: int, rows: Rows | None = None) -> Tensors:
        """What the towers take. The batch holds these rows of the step's batch (default: all)."""
        raise _indivisible(self)

    def embed(self, inputs: Tensors) -> Tensors:
        """Raw embeddings, among them `left` and, unless it is a constant, `right`."""
        raise _indivisible(self)

    def constants(self, inputs: Tensors, step: int) -> Tensors:
        """What the losses need besides, without a gradient; by default nothing."""
        return {}

    def losses(self, embedded: Tensors) -> Tensors:
        """The named losses of all embeddings and constants; `loss` is the one to differentiate."""
        raise _indivisible(self)

    def forward(self, batch: Any, step: int) -> Step:
        """The four parts, one after the other, on the whole batch."""
        inputs = self.inputs(batch, step)
        embedded = self.embed(inputs)
        with torch.no_grad():
            embedded |= self.constants(inputs, step)
        return Step(self.losses(embedded), embedded["left"], embedded["right"])

    def telemetry(self, step: Step) -> dict[str, float]:
        """Further numbers for a logged step; by default none."""
        return {}

    def after_step(self, progress: float) -> None:
        """What follows the optimiser's step, at this share of the training; by default nothing."""


def objective_of(
    settings: TrainSettings,
    loss: str,
    population: int,
    *,
    direction: str = "both",
    within_view: bool = False,
    false_negatives: str = "keep",
) -> Objective:
    """The objective that the shared settings describe."""
    return Objective(
        settings.cell,
        loss,
        population=population,
        temperature=settings.temperature,
        learnable_temperature=settings.learnable_temperature,
        scale=settings.scale,
        direction=direction,
        within_view=within_view,
        batch_mean_norm=settings.batch_mean_norm,
        variance_weight=settings.variance_weight,
        variance_on=settings.variance_on,
        gor_weight=settings.gor_weight,
        negatives=settings.negatives,
        false_negatives=false_negatives,
        loss_precision=settings.loss_precision,
    )


def _indivisible(method: Method) -> NotImplementedError:
    return NotImplementedError(
        f"{type(method).__name__} has only a forward pass: to train it on several ranks or in "
        "micro-batches, give it inputs, embed and losses."
    )


@runtime_checkable
class Streamed(Protocol):
    """Batches that can only be read in order."""

    def from_step(self, start: int, total: int) -> Iterable[Any]:
        """The batches of the steps `start` to `total` - 1."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """Batches of which some rows can be had without the cost of the others."""

    def part(self, step: int, rows: Rows) -> Any:
        """These rows of a step's batch."""
        ...


class Experiment:
    """What a run trains and measures. Its data are read when it is made; `build` does the rest.

    In between the run compares its data with those of its first start, and its budget with their
    number, so that what does not fit is refused before an encoder is loaded or a feature computed.
    """

    settings: Any
    """The run's settings: the script's own kind of `TrainSettings`."""
    method: Any
    """The `Method` that is trained."""
    batches: Dataset | Streamed
    """batches[step] is the batch of a step, or `from_step` reads them in order."""
    population: int
    """Training samples, known as soon as the experiment is made."""
    splits: Any = None
    """The data: the lane's own kind of `Splits`, or None if `describe` is the experiment's own."""
    held_out: Any = None
    """The validation data by which --keep=best chooses, if there are any."""

    def describe(self) -> dict[str, object]:
        """The data by name, size and fingerprint, for the record."""
        return {} if self.splits is None else self.splits.describe()

    def build(self) -> None:
        """Make method and batches."""

    def exponents(self) -> tuple[float, float]:
        """The exponents that score in evaluation: the eval cell's, else those trained so far."""
        cell = self.settings.eval_cell
        return (self.method.objective.cell if cell is None else Cell(cell)).numbers()

    def evaluate(self) -> dict[str, float]:
        """Named numbers of the method as it stands."""
        return {}

    def validate(self) -> float:
        """One number on the held-out data alone, higher being better."""
        raise NotImplementedError(f"{type(self).__name__} has held-out data, but measures nothing.")

    def files(self) -> dict[str, Tensors]:
        """What is kept beside the record at the end: file names and their named tensors."""
        return {}
