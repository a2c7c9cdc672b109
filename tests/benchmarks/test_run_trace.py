"""The walk through one small run: how it is counted, and that it does not grow."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# By its path: benchmarks/ is no package, and its other names (clip, study) belong to others.
spec = importlib.util.spec_from_file_location("run_trace", ROOT / "benchmarks/run_trace.py")
run_trace = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run_trace  # its dataclass looks itself up
spec.loader.exec_module(run_trace)


def test_a_change_of_file_and_a_crossing_are_counted_between_functions_in_order():
    functions = [
        ("vision/train_simclr.py", "run"),
        ("offsphere/training/run.py", "train_run"),
        ("offsphere/training/run.py", "_open"),
        ("offsphere/run/record.py", "open_run"),
        ("vision/methods.py", "build"),
    ]
    assert run_trace.walk(functions) == (4, 3, 2)


def test_one_small_run_is_no_longer_walk_than_it_was():
    """What was measured when this was written; the aim is 25 files, 70 changes, 12 crossings."""
    found = {name: run_trace.walk(seen) for name, seen in run_trace.follow(ROOT).items()}
    assert all(a <= b for a, b in zip(found["whole"], (44, 156, 11), strict=True)), found
    assert all(a <= b for a, b in zip(found["spine"], (30, 93, 9), strict=True)), found
