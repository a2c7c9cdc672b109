"""How far a reader walks through the code to follow one small SimCLR run.

    python benchmarks/run_trace.py                  this tree
    python benchmarks/run_trace.py --tree=OLDER     another clone, such as one of an older commit

The reader starts at the script's `run(config)` and follows every call in the order in which it is
made, until the run is recorded. A function is read once, when it is first called: `files` are those
that are opened, `changes` the steps from one function to the next that lead into another file, and
`crossings` those of them between a lane and the library. Imports and the making of the settings
are not followed, and a comprehension is read with the function that it stands in (Python 3.11
enters it as one of its own, 3.12 does not). The run is a machine's first, with an empty cache.

`whole` follows everything; `spine` stops at the door of the rooms that a run only uses (the core,
data, encoders, evaluation, run): it reads what the lane and offsphere/training call, and not what
happens behind it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RUN_ROOM, CONFIG, OLD_CONFIG = "offsphere/run", "offsphere.run.config", "offsphere.config"
LANES = ("vision", "crossmodal", "text", "theory")
IMPORTED = ("offsphere.", "vision.")
NOT_IMPORTED = ("offsphere.analysis", "offsphere.study", "offsphere.cli", "offsphere.dropin")
NOT_READ = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>")
FLAGS = (
    *("--cell=dot", "--data=emoji", "--image-size=16", "--limit=64", "--batch-size=16"),
    *("--samples=64", "--log-every=2", "--threads=1", "--device=cpu", "--no-progress"),
)


@dataclass(frozen=True)
class Config:
    tree: str = str(ROOT)
    """The clone whose code is followed."""
    calls: bool = False
    """Print each function as it is read."""


class Walk(NamedTuple):
    files: int
    changes: int
    crossings: int


Function = tuple[str, str]
"""A file of the project and the name of a function in it."""


def walk(functions: Sequence[Function]) -> Walk:
    """What reading these functions in order costs."""
    steps = [(a[0], b[0]) for a, b in itertools.pairwise(functions) if a[0] != b[0]]
    crossings = sum((_room(a) in LANES) != (_room(b) in LANES) for a, b in steps)
    return Walk(len({file for file, _ in functions}), len(steps), crossings)


def on_spine(file: str) -> bool:
    """Whether a file belongs to the run itself, not to the rooms that it uses."""
    return _room(file) in LANES or file.startswith("offsphere/training/")


def _room(file: str) -> str:
    return file.partition("/")[0]


class Trace:
    """A profiler that notes the project's functions in the order of their first calls."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root}/"
        self.known: dict[str, str | None] = {}
        self.whole: dict[Function, None] = {}
        self.spine: dict[Function, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        function = self._function(frame) if event == "call" else None
        if function is None:
            return
        self.whole.setdefault(function)
        caller = frame.f_back
        while caller is not None and self._function(caller) is None:
            caller = caller.f_back
        by = None if caller is None else self._function(caller)
        if by is None or on_spine(by[0]):
            self.spine.setdefault(function)

    def _function(self, frame: FrameType) -> Function | None:
        code = frame.f_code
        if code.co_filename not in self.known:
            self.known[code.co_filename] = self._project_file(code.co_filename)
        file = self.known[code.co_filename]
        return None if file is None or code.co_name in NOT_READ else (file, code.co_qualname)

    def _project_file(self, name: str) -> str | None:
        file = name.removeprefix(self.root)
        inside = name.startswith(self.root) and _room(file) in (*LANES, "offsphere")
        return file if inside else None


def follow(tree: Path) -> dict[str, list[Function]]:
    """The functions of `whole` and `spine`, from a process of its own that has the tree's code."""
    paths = [str(tree), str(Path(__file__).parent)]
    with tempfile.TemporaryDirectory() as folder:
        code = f"import run_trace; run_trace.trace({str(tree)!r}, {folder!r})"
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": folder},
        )
        found = json.loads((Path(folder) / "functions.json").read_text())
    return {name: [(file, function) for file, function in rows] for name, rows in found.items()}


def trace(tree: str, folder: str) -> None:
    """Do the run below `folder` and write down what it entered."""
    parse = importlib.import_module(CONFIG if Path(tree, RUN_ROOM).exists() else OLD_CONFIG).parse
    script = importlib.import_module("vision.train_simclr")
    for module in pkgutil.walk_packages([tree], ""):  # imported before, so that none is followed
        if module.name.startswith(IMPORTED) and not module.name.startswith(NOT_IMPORTED):
            importlib.import_module(module.name)
    sys.argv[0] = "train_simclr.py"
    config = parse(script.Config, [*FLAGS, f"--out={folder}"])
    seen = Trace(Path(tree))
    sys.setprofile(seen)
    try:
        script.run(config)
    finally:
        sys.setprofile(None)
    functions = {"whole": list(seen.whole), "spine": list(seen.spine)}
    (Path(folder) / "functions.json").write_text(json.dumps(functions))


def main() -> None:
    """Flags in, two lines out."""
    from offsphere.run.command import one_line_errors
    from offsphere.run.config import parse

    with one_line_errors("run_trace", "Nothing was written."):
        config = parse(Config, description=__doc__)
        for name, functions in follow(Path(config.tree).resolve()).items():
            print(f"{name}: {walk(functions)._asdict()} in {len(functions)} functions")
            if config.calls:
                print("\n".join(f"    {file} {function}" for file, function in functions))


if __name__ == "__main__":
    main()
