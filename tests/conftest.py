"""Scripts as real processes that need not wait for their imports: a warm one forks them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Two workers share two cores (pyproject's -n 2): one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import shapes

# Before anything of the house is imported. The analysis takes lists as well as arrays.
LANES = ("vision", "crossmodal", "text", "theory")
shapes.install("offsphere", *LANES, but=("offsphere.analysis",))

ROOT = Path(__file__).parents[1]
WARM = """
import json, os, resource, runpy, sys
import lightning_fabric, lightly.transforms, torch, torchvision.transforms.v2.functional
import crossmodal.experiment, offsphere.training.images, vision.train_moco, vision.train_simclr
from matplotlib.figure import Figure

def become(job):
    os.setsid()
    os.chdir(job["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if job["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    sys.argv = job["argv"]
    code = 1
    try:
        runpy.run_path(job["argv"][0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    job = json.loads(line)
    if "argv" in job:
        answer = os.fork()
        if not answer:
            become(job)
    else:
        pid, status = os.waitpid(job["pid"], 0 if job["wait"] else os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Script:
    """A running or ended script: its exit code (negative: the signal) and what it said."""

    pid: int
    folder: Path
    server: Scripts
    code: int | None = None

    def alive(self) -> bool:
        return self._ask(wait=False) is None

    def wait(self) -> int:
        code = self._ask(wait=True)
        assert code is not None
        return code

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def _ask(self, *, wait: bool) -> int | None:
        if self.code is None:
            self.code = self.server.ask({"pid": self.pid, "wait": wait})
        return self.code


class Scripts:
    """Starts `LANE/NAME.py` with flags, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.warm = subprocess.Popen(
            [sys.executable, "-c", WARM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: dict[str, Any]) -> Any:
        assert self.warm.stdin is not None
        assert self.warm.stdout is not None
        self.warm.stdin.write(json.dumps(job) + "\n")
        self.warm.stdin.flush()
        return json.loads(self.warm.stdout.readline())

    def start(
        self, name: str, *flags: str, largest_file: int = 0, cwd: Path | None = None
    ) -> Script:
        """The script at work; `largest_file` in bytes plays the full disk."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        job = {
            "argv": [str(next(ROOT.glob(f"[!.]*/{name}.py"))), *flags],
            "folder": str(cwd or folder),
            "stdout": str(folder / "stdout"),
            "stderr": str(folder / "stderr"),
            "largest_file": largest_file,
        }
        return Script(self.ask(job), folder, self)

    def run(self, name: str, *flags: str, largest_file: int = 0, cwd: Path | None = None) -> Script:
        """The script at its end."""
        script = self.start(name, *flags, largest_file=largest_file, cwd=cwd)
        script.wait()
        return script

    def close(self) -> None:
        self.warm.communicate()


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    started = Scripts(tmp_path_factory.mktemp("scripts"))
    yield started
    started.close()


def rows_written(out: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in out.glob("*/*/steps.jsonl"))


@pytest.fixture
def wait_for_rows():
    """Wait until so many rows of telemetry are below a folder, or the script has ended."""

    def wait(script: Script, out: Path, rows: int) -> None:
        while rows_written(out) < rows and script.alive():
            time.sleep(0.003)

    return wait


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A port nobody listens at, each time another. It lies below those the system gives to outgoing
    connections (32,768 and up on Linux), so that none of them takes it meanwhile."""

    def find() -> int:
        while True:
            with socket.socket() as s, contextlib.suppress(OSError):
                s.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
                return s.getsockname()[1]

    return find
