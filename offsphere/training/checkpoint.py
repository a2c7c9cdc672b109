"""Checkpoints: everything a run needs to go on, in one file that is replaced in one piece."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from offsphere.run.files import atomic_write

FILE = "last.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; until that is complete on disk the old checkpoint stays as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    # In memory first: torch's zip writer turns a full disk into an error that hides its cause.
    content = io.BytesIO()
    torch.save(state, content)
    atomic_write(folder / FILE, lambda file: file.write(content.getbuffer()))


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
