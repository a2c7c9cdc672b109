"""Checkpoints: everything a run needs to go on, in one file that is replaced in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from offsphere.record import atomic_write

FILE = "last.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; until that is complete on disk the old checkpoint stays as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / FILE, lambda file: torch.save(state, file))


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last complete state on the CPU, or None if the run has none yet."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"Cannot read the checkpoint {file}: {error}. It is damaged; delete it to start the "
            "run anew, or bring back a copy."
        ) from error
