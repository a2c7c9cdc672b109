"""--keep=best: the weights that scored highest on validation data, instead of the last ones."""

from __future__ import annotations

import math
from typing import Any

import torch

from offsphere.training.experiment import Experiment
from offsphere.training.ranks import Ranks
from offsphere.training.settings import TrainSettings


class Best:
    """The best weights so far: `kept` has their steps, score and state, or is None.

    `kept` goes into the run's one checkpoint file, beside the weights as they stand. So the two
    always belong together, and a run that was cut chooses as if it had not been.
    """

    def __init__(self, experiment: Experiment, ranks: Ranks, state: dict | None) -> None:
        self.experiment, self.ranks = experiment, ranks
        self.kept: dict[str, Any] | None = None if state is None else state.get("best")

    def look(self, steps: int) -> dict[str, float]:
        """Score the weights after so many steps and keep them if none before was as good."""
        score = self.ranks.on_first(self.experiment.validate)
        if self.kept is None or _order(score) > _order(self.kept["score"]):
            state = self.experiment.method.state_dict()
            weights = {name: x.to("cpu", copy=True) for name, x in state.items()}
            self.kept = {"step": steps, "score": score, "method": weights}
        return {"validation/score": score}

    def restore(self) -> dict[str, float]:
        """Bring the kept weights back; their steps and score, and the exponents they hold."""
        assert self.kept is not None
        method = self.experiment.method
        method.load_state_dict(self.kept["method"])
        with torch.no_grad():
            left, right = (float(g) for g in method.objective.cell.exponents)
        return {
            "run/kept_steps": self.kept["step"],
            "validation/score": self.kept["score"],
            "train/exponent_left": left,
            "train/exponent_right": right,
        }


def best_of(
    experiment: Experiment, settings: TrainSettings, ranks: Ranks, state: dict[str, Any] | None
) -> Best | None:
    """What chooses the weights of a run that starts, or goes on, from `state`; None: the last."""
    check_held_out(experiment, settings)
    return None if settings.keep == "last" else Best(experiment, ranks, state)


def check_held_out(experiment: Experiment, settings: TrainSettings) -> None:
    """Refuse to choose weights where there is nothing to choose them by."""
    if settings.keep == "best" and experiment.held_out is None:
        raise ValueError(
            "--keep=best needs validation data, and this run has none: use data with a validation "
            "part (streamed shards have none), or --keep=last."
        )


def _order(score: float) -> float:
    """What cannot be measured is worse than anything that can."""
    return -math.inf if math.isnan(score) else score
