"""How commands end: one line, the right exit code, and quietly where nobody listens."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offsphere.run.command import (
    NOBODY_LISTENS,
    Stopped,
    loss_in_words,
    memory_need,
    one_line_errors,
    typed,
)
from offsphere.run.files import atomic_write

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal
from torch.utils.data import DataLoader, Dataset
from offsphere.run.command import loss_in_words, one_line_errors

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


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ValueError("bad"), "name: error: bad", 1),
        (FileNotFoundError(errno.ENOENT, "gone", "x"), "name: error: [Errno 2] gone: 'x'", 1),
        (BrokenPipeError(errno.EPIPE, "a worker's"), "name: error: [Errno 32] a worker's", 1),
        (Stopped("enough"), "name: enough", 1),
        (KeyboardInterrupt(), "name: interrupted. Nothing was written.", 130),
        (MemoryError(), "name: error: not enough memory: an allocation failed. Lower", 1),
    ],
)
def test_one_line(error, line, code, capsys):
    with pytest.raises(SystemExit) as end, one_line_errors("name", "Nothing was written."):
        raise error
    assert end.value.code == code
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


def test_a_termination_ends_in_one_line_and_takes_back_what_is_half_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as end, one_line_errors("name", "Nothing was written."):
        atomic_write(tmp_path / "file", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (end.value.code, list(tmp_path.iterdir())) == (130, [])
    assert capsys.readouterr().err == "name: interrupted. Nothing was written.\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_termination_of_a_forked_process_or_another_rank_is_silent(capfd, monkeypatch):
    with one_line_errors("name", ""):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end, one_line_errors("name", ""):
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 130
    assert capfd.readouterr() == ("", "")


def test_a_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a defect"), one_line_errors("name", ""):
        raise RuntimeError("a defect")


def test_what_torch_and_numpy_say_about_memory():
    import numpy as np
    import torch

    with pytest.raises(MemoryError) as numpys:
        np.empty((10**9, 10**9), np.uint8)
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(10**15)
    assert str(memory_need(numpys.value)).startswith("Unable to allocate 888. PiB")
    expected = "can't allocate memory: you tried to allocate 4000000000000000 bytes"
    assert str(memory_need(torchs.value)).startswith(expected)
    assert memory_need(RuntimeError("shapes cannot be multiplied")) is None


@pytest.mark.parametrize(
    ("argv", "orig", "expected"),
    [
        (["vision/train_simclr.py", "--help"], ["python", "vision/train_simclr.py", "--help"],
         "python vision/train_simclr.py"),
        (["/bin/offsphere", "shards", "make", "--out=x"], ["python", "/bin/offsphere", "shards"],
         "offsphere shards make"),
        (["/x/offsphere/theory/simplex.py"], ["python", "-m", "theory.simplex"],
         "python -m theory.simplex"),
        (["vision/train_moco.py"], ["python", "-m", "pytest"], "python vision/train_moco.py"),
    ],
)  # fmt: skip
def test_the_command_as_it_was_typed(argv, orig, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig)
    assert typed() == expected


@pytest.mark.parametrize(
    "words",
    [
        ["vision/train_simclr.py", "--help"],
        ["vision/eval_probe.py", "--help"],
        ["-m", "offsphere.cli", "--help"],
        ["-m", "offsphere.cli", "study", "--help"],
        ["-m", "theory.simplex", "--help"],
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_a_command_quietly(words, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    os.close(write)
    assert ended.stderr == ""
    forgiven = [0] if "study" in words else []  # argparse ignores it if nothing is buffered
    assert ended.returncode in [NOBODY_LISTENS, *forgiven]


def test_a_full_disk_behind_stdout_is_said():
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "offsphere.cli", "--help"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "[Errno 28] No space left" in ended.stderr
    assert ended.stderr.count("\n") == 1


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
