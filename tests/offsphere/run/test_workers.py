"""A data worker that the system ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offsphere.run.workers import loss_in_words

KILLED = """
import os, signal
from torch.utils.data import DataLoader, Dataset
from offsphere.run.command import one_line_errors
from offsphere.run.workers import loss_in_words

class Dying(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

with one_line_errors("train", "Go on."), loss_in_words():
    for batch in DataLoader(Dying(), num_workers=2):
        pass
"""


def test_a_killed_worker_ends_in_one_line() -> None:
    """In a process of its own: torch raises wherever the main process is when it hears of it."""
    ended = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert ended.returncode == 1
    said = ended.stderr.strip()
    assert "\n" not in said
    assert said.startswith("train: error: A process that reads data was lost (DataLoader worker")
    assert said.count("A process that reads data was lost") == 1
    assert "use fewer --workers" in said


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="^shapes do not match$"), loss_in_words():
        raise RuntimeError("shapes do not match")
