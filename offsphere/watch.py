"""Norm telemetry in training code that is not ours: a plain loop, Lightning, Hugging Face.

    telemetry = Telemetry(cell="dot", temperature=0.07, every=50)
    numbers = telemetry(left, right)  # in the loop, on raw embeddings; {} between two readings

Where the embeddings are out of reach, let it watch the loss, which is called with both sides, or
the two towers, and hand it to the trainer:

    telemetry = Telemetry(every=50).watch(loss)
    lightning.pytorch.Trainer(callbacks=[lightning_callback(telemetry)])
    trainer.add_callback(trainer_callback(telemetry, trainer))  # Hugging Face's, its logs

It warns, once of each kind, of embeddings that collapse. Nothing here changes the training.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offsphere.cells import Cell
from offsphere.evaluation.geometry import batch_numbers

if TYPE_CHECKING:
    from jaxtyping import Float

    Temperature = float | Tensor | Callable[[], float | Tensor] | None
    Scoring = tuple[Sequence[float | Tensor], float | Tensor | None]

# When to warn; the thresholds are ours. Encoders that were only pretrained reach a mean cosine of
# 0.9, and an effective rank of a fifth of what is possible.
SAME_DIRECTION = 0.99
"""Mean cosine of two rows that are no pair."""
LOW_RANK = 0.1
"""Effective rank of the directions, over the largest possible: rows or width."""
NORM_FACTOR = 100.0
"""Mean norm over that of the first reading, or its inverse."""


class CollapseWarning(UserWarning):
    """Embeddings stop telling things apart."""


class Telemetry:
    """The numbers of every so many batches, called `train/NAME`, and a warning of collapse.

    A temperature that changes is given as a function: `lambda: 1 / model.logit_scale.exp()`. Cell
    and temperature of a watched loss of offsphere are its own.
    """

    def __init__(
        self, cell: str | Cell = "cosine", temperature: Temperature = None, *, every: int = 1
    ) -> None:
        if every < 1:
            raise ValueError(f"Expected a reading every 1 or more batches, got every={every}.")
        self.cell = Cell(cell) if isinstance(cell, str) else cell
        self.temperature: Temperature = temperature
        self.every = every
        self._batches = 0
        self._first_norms: tuple[float, float] | None = None
        self._warned: set[str] = set()
        self._seen: tuple[Tensor, Tensor, Scoring] | None = None

    def __call__(self, left: Float[Tensor, "n d"], right: Float[Tensor, "n d"]) -> dict[str, float]:
        """The numbers of this batch of raw embeddings; nothing between two readings."""
        return self._measure(left.detach(), right.detach(), self._scoring())

    def _measure(self, left: Tensor, right: Tensor, scoring: Scoring) -> dict[str, float]:
        if not (_is_matrix(left) and _is_matrix(right) and left.shape == right.shape):
            raise ValueError(
                "Expected the raw embeddings of both sides as floating-point matrices of one "
                f"shape, got {left.dtype} of {tuple(left.shape)} and {right.dtype} of "
                f"{tuple(right.shape)}."
            )
        self._batches += 1
        if (self._batches - 1) % self.every or len(left) < 2:  # one row has no negatives
            return {}
        lost = int((~(torch.isfinite(left).all(1) & torch.isfinite(right).all(1))).sum())
        if lost:
            self._warn("finite", f"{lost} of {len(left)} pairs of embeddings are NaN or infinite")
            return {"train/bad_pairs": float(lost)}
        numbers = batch_numbers(left, right, *scoring)
        self._look(numbers, min(left.shape))
        return {f"train/{name}": value for name, value in numbers.items()}

    def watch(self, *modules: nn.Module) -> Telemetry:
        """See the two sides of one loss, by its arguments, or of two towers, by their outputs.

        A tower that serves both sides is given twice: its first call is the left side.
        """
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"Expected a module to watch, got {type(module).__name__}: in a loop call the "
                    "telemetry with both sides instead."
                )
        if len(modules) == 1:
            self.cell = getattr(modules[0], "cell", self.cell)
            if self.temperature is None and hasattr(modules[0], "temperature"):
                self.temperature = lambda: modules[0].temperature  # pyright: ignore
            modules[0].register_forward_hook(self._see_arguments, with_kwargs=True)
        elif len(modules) == 2:
            outputs: dict[int, Tensor] = {}
            same = modules[0] is modules[1]
            for place, module in enumerate(modules[:1] if same else modules):
                at = None if same else place
                module.register_forward_hook(lambda *seen, at=at: self._see(outputs, at, seen[2]))
        else:
            raise ValueError(f"Expected one loss or two towers to watch, got {len(modules)}.")
        return self

    def read(self) -> dict[str, float]:
        """The numbers of the batch that was seen last, if there is one that was not read."""
        if self._seen is None:
            return {}
        seen, self._seen = self._seen, None
        return self._measure(*seen)

    @torch.no_grad()
    def _scoring(self) -> Scoring:
        """Exponents and temperature as they are now: the optimizer may be about to change them."""
        given = self.temperature
        now = given() if callable(given) else given
        return self.cell.exponents, now.detach().clone() if isinstance(now, Tensor) else now

    def _see_arguments(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any
    ) -> None:
        sides = [x for x in (*args, *kwargs.values()) if _is_matrix(x)][:2]
        if len(sides) == 2:
            self._seen = sides[0].detach(), sides[1].detach(), self._scoring()

    def _see(self, outputs: dict[int, Tensor], place: int | None, out: Any) -> None:
        """Keep a tower's output in its place, or in the next one, until both are there."""
        if _is_matrix(out):
            outputs[len(outputs) if place is None else place] = out.detach()
        if len(outputs) == 2:
            self._seen = outputs[0], outputs[1], self._scoring()
            outputs.clear()

    def _look(self, numbers: dict[str, float], most: int) -> None:
        """Warn of directions that are all the same, of few of them, and of norms that run away."""
        mean, rank = numbers["negative_mean"], numbers["rankme_unit"]
        if mean > SAME_DIRECTION:
            said = f"all embeddings point the same way (mean cosine of negatives {mean:.3f})"
            self._warn("direction", said)
        elif rank < LOW_RANK * most:
            said = f"embeddings fill {rank:.1f} of {most} directions (RankMe)"
            self._warn("rank", said)
        norms = numbers["norm_left_mean"], numbers["norm_right_mean"]
        if 0 in norms:
            self._warn("zero", "all embeddings of a side are zeros")
            return
        first = self._first_norms = self._first_norms or norms
        for side, now, before in zip(("left", "right"), norms, first, strict=True):
            factor = now / before
            if not 1 / NORM_FACTOR < factor < NORM_FACTOR:
                said = f"{side} norms are {factor:.3g} times what they were at first"
                self._warn(side, f"{said} ({before:.3g} to {now:.3g})")

    def _warn(self, kind: str, said: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"Collapse in batch {self._batches}: {said}. Lower the learning rate, raise the "
                "temperature, or use a larger batch.",
                CollapseWarning,
                stacklevel=4,
            )


def lightning_callback(telemetry: Telemetry) -> Any:
    """A callback for Lightning's Trainer that logs what the telemetry has seen, step by step."""
    # Two names of one package; the user's is the one that is loaded already.
    known = ("lightning.pytorch", "pytorch_lightning")
    callback = _first_import([name for name in known if name in sys.modules] + list(known))

    class NormTelemetry(callback.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if numbers := telemetry.read():
                pl_module.log_dict(numbers)

    return NormTelemetry()


def trainer_callback(telemetry: Telemetry, trainer: Any) -> Any:
    """A callback for this Trainer of Hugging Face, in whose logs the numbers then are."""
    transformers = _first_import(["transformers"])

    class NormTelemetry(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if numbers := telemetry.read():
                asked = control.should_log
                trainer.log(numbers)
                control.should_log = asked  # which a log takes back, and the loss with it

    return NormTelemetry()


def _first_import(names: Iterable[str]) -> Any:
    import importlib

    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ValueError(f"Expected {' or '.join(dict.fromkeys(names))} to be installed.")


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()
