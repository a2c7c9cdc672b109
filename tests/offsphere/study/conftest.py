"""Studies of the toy script, in this process or as a process of their own that can be killed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The toy script as a module that worker processes can import too."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("toy")


class Launcher:
    """Starts `offsphere study` with the toy scripts in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []

    def start(
        self, *flags: object, stderr: int = subprocess.PIPE, **env: str
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        process = subprocess.Popen(
            [sys.executable, "-c", "import toy; toy.start()", *map(str, flags)],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path, "RAY_raylet_start_wait_time_s": "300"} | env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *flags: object, **env: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a study at its end."""
        process = self.start(*flags, **env)
        output, errors = process.communicate()
        return process.returncode, output, errors


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
