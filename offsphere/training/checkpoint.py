"""Checkpoints: everything a run needs to go on, in one file that is replaced in one piece."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from offsphere.record import atomic_write

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
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"Cannot read the checkpoint {file}: it is damaged ({type(error).__name__}). Delete it "
            "to start the run anew, or bring back a copy."
        ) from error
