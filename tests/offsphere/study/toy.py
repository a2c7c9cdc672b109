"""A small script with checkpoints, for studies that take seconds; it also plays several faults."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offsphere.analysis import tables
from offsphere.run.command import Stopped
from offsphere.run.config import unhashed
from offsphere.run.record import open_run, write_json
from offsphere.run.scripts import Script
from offsphere.study.command import main


@dataclass(frozen=True)
class Config:
    cell: str = "cosine"
    lr: float = 0.1
    batch_size: int = 8
    steps: int = 3
    fault: Literal["none", "crash", "crash once", "killed", "exit", "diverges"] = "none"
    eval_split: Literal["test", "validation"] = "test"
    seed: int = 0
    threads: int = 2
    pause: float = unhashed(0.0)
    study: str | None = unhashed(None)
    out: str = unhashed("results")

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"--lr must be above 0, got {self.lr}.")


def score(config: Config, step: int) -> float:
    """Best at lr 0.3 for dot and at 0.1 for the others."""
    best = 0.3 if config.cell == "dot" else 0.1
    return config.seed + step / 7 - abs(config.lr - best)


def run(config: Config) -> dict:
    with open_run(config, script="toy", out=config.out, study=config.study) as folder:
        if folder.state == "finished":
            return folder.metrics()
        file = folder.checkpoint / "state.json"
        state = json.loads(file.read_text()) if file.exists() else {"step": 0, "sum": 0.0}
        folder.rewind(state["step"] - 1)
        print(f"{config.cell} starts at step {state['step']} in process {os.getpid()}")
        for step in range(state["step"], config.steps):
            _play(config, folder.path, step)
            time.sleep(config.pause)
            folder.log_step({"step": step, "train/loss": score(config, step)})
            state = {"step": step + 1, "sum": state["sum"] + score(config, step)}
            write_json(file, state)
        folder.finish({"test/score": score(config, config.steps), "test/sum": state["sum"]})
        return folder.metrics()


def _play(config: Config, folder: Path, step: int) -> None:
    if step != 1 or config.fault == "none":
        return
    if config.fault == "crash":
        raise RuntimeError("a fault in step 1")
    if config.fault == "diverges":
        raise Stopped("diverged: the loss is not a number at step 1.")
    if config.fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.fault == "exit":
        os._exit(3)
    if not (folder / "tried").exists():
        (folder / "tried").touch()
        raise RuntimeError("only the first time")


def toy() -> Script:
    return Script("toy.py", Config, run)


def simclr() -> Script:
    from vision import train_simclr

    return Script("vision/train_simclr.py", train_simclr.Config, train_simclr.run)


SCRIPTS = {"toy": toy, "train_simclr": simclr}


def torn(path: Path, content: bytes) -> None:
    """An append that is killed in its middle."""
    with path.open("ab", buffering=0) as file:
        file.write(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def start() -> None:
    if os.environ.get("TORN_APPEND"):
        tables._append = torn
    main(sys.argv[1:], SCRIPTS)
