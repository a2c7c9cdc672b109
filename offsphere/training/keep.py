"""--keep=best: the weights that scored highest on validation data, instead of the last ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from offsphere.training.ranks import Ranks
from offsphere.training.settings import TrainSettings

if TYPE_CHECKING:
    from offsphere.training.loop import Method


class Best:
    """The best weights so far: `kept` has their steps, score and state, or is None.

    `kept` goes into the run's one checkpoint file, beside the weights as they stand. So the two
    always belong together, and a run that was cut chooses as if it had not been.
    """

    def __init__(
        self, method: Method, validate: Callable[[], float], ranks: Ranks, state: dict | None
    ) -> None:
        self.method, self.validate, self.ranks = method, validate, ranks
        self.kept: dict[str, Any] | None = None if state is None else state.get("best")

    def look(self, steps: int) -> dict[str, float]:
        """Score the weights after so many steps and keep them if none before was as good."""
        score = self.ranks.on_first(self.validate)
        if self.kept is None or _order(score) > _order(self.kept["score"]):
            state = self.method.state_dict()
            weights = {name: x.to("cpu", copy=True) for name, x in state.items()}
            self.kept = {"step": steps, "score": score, "method": weights}
        return {"validation/score": score}

    def restore(self) -> dict[str, float]:
        """Bring the kept weights back; their steps and score, and the exponents they hold."""
        assert self.kept is not None
        self.method.load_state_dict(self.kept["method"])
        with torch.no_grad():
            left, right = (float(g) for g in self.method.objective.cell.exponents)
        return {
            "run/kept_steps": self.kept["step"],
            "validation/score": self.kept["score"],
            "train/exponent_left": left,
            "train/exponent_right": right,
        }


def best_of(
    method: Method,
    validate: Callable[[], float] | None,
    settings: TrainSettings,
    ranks: Ranks,
    state: dict[str, Any] | None,
) -> Best | None:
    """What chooses the weights of a run that starts, or goes on, from `state`; None: the last."""
    if settings.keep == "last":
        return None
    if validate is None:
        raise ValueError(
            "--keep=best needs validation data, and this run has none: use data with a validation "
            "part (streamed shards have none), or --keep=last."
        )
    return Best(method, validate, ranks, state)


def _order(score: float) -> float:
    """What cannot be measured is worse than anything that can."""
    return -math.inf if math.isnan(score) else score
