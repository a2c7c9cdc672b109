"""Checkpoints: everything a run needs to resume, in one file that is replaced in one piece. With
--keep=best that includes the weights that scored highest on validation data."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch

from offsphere.run.files import write_whole
from offsphere.training.experiment import Experiment
from offsphere.training.ranks import Ranks

FILE = "last.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; until that is complete on disk the old checkpoint stays as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    # In memory first: torch's zip writer turns a full disk into an error that hides its cause.
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(folder / FILE, content.getbuffer())


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last complete state on the CPU, or None if the run has none yet."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"Cannot read the checkpoint {file}: it is damaged ({type(error).__name__}). Delete it "
            "to start the run anew, or bring back a copy."
        ) from error
    if (wrong := _wrong(state)) is not None:
        raise ValueError(
            f"The checkpoint {file} is not one that offsphere wrote: {wrong}. Delete it to start "
            "the run anew, or bring back a copy."
        )
    return state


def _wrong(state: Any) -> str | None:
    """What a state has or lacks that no run's has; None if nothing."""
    if not isinstance(state, dict):
        return f"it holds a {type(state).__name__}"
    kinds = {"step": int, "method": dict, "optimizers": list, "facts": dict}
    if lacking := [name for name in kinds if name not in state]:
        return f"it lacks {', '.join(lacking)}"
    for name, kind in kinds.items():
        if not isinstance(state[name], kind) or isinstance(state[name], bool):
            return f"its {name} is {state[name]!r:.40}" if name == "step" else f"its {name} is odd"
    if not isinstance(state["facts"].get("untrained"), dict):
        return "it lacks the numbers of the untrained model"
    return f"its step is {state['step']}" if state["step"] < 0 else None


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
        left, right = method.objective.cell.numbers()
        return {
            "run/kept_steps": self.kept["step"],
            "validation/score": self.kept["score"],
            "train/exponent_left": left,
            "train/exponent_right": right,
        }


def _order(score: float) -> float:
    """What cannot be measured is worse than anything that can."""
    return -math.inf if math.isnan(score) else score
