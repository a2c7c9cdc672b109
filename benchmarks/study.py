"""A study of 16 short runs against the same 16 scripts launched one after another, in one go.

    python benchmarks/study.py

Both do the same work with the same settings (tiny SimCLR runs on the embedded emoji, one thread
each); the study keeps its worker processes, so that imports and data are paid for once per worker.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from offsphere.analysis.tables import read_runs
from offsphere.run.config import command
from offsphere.run.scripts import Script
from offsphere.study.command import main
from offsphere.study.plan import load_study, main_runs

STUDY = """
script: train_simclr
seeds: [0, 1, 2, 3]
fixed: {data: emoji, limit: 256, image_size: 16, batch_size: 64, samples: 512, layer: backbone}
grid: {cell: [cosine, dot, qnorm, dnorm]}
"""
ROOT = Path(__file__).parents[1]
OUTCOME = ["run", "test/probe", "test/knn", "train/loss"]


def train_simclr() -> Script:
    from vision import train_simclr

    return Script(str(ROOT / "vision" / "train_simclr.py"), train_simclr.Config, train_simclr.run)


SCRIPTS = {"train_simclr": train_simclr}


def seconds_one_after_another(file: Path, out: str) -> float:
    """Launch every script of the study by itself."""
    study = load_study(file, SCRIPTS)
    commands = [
        shlex.split(command(run.script.path, run.settings))
        for run in main_runs(study, SCRIPTS, out, lambda _tune, _point: None)
    ]
    begin = time.perf_counter()
    for words in commands:
        subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
    return time.perf_counter() - begin


def seconds_as_a_study(file: Path, out: str) -> float:
    """Run the study with the local engine, from a cold start."""
    begin = time.perf_counter()
    words = [sys.executable, __file__, str(file), f"--out={out}"]
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - begin


def compare() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, studied, launched = (Path(folder) / x for x in ("short.yaml", "study", "launched"))
        file.write_text(STUDY)
        together = seconds_as_a_study(file, str(studied))
        alone = seconds_one_after_another(file, str(launched))
        main([str(file), f"--out={launched}"], SCRIPTS)  # all are finished: only the table is made
        tables = [read_runs(out / "short" / "runs.csv")[OUTCOME] for out in (studied, launched)]
    if not tables[0].equals(tables[1]):
        raise SystemExit("The study's numbers are not those of the scripts.")
    runs = len(tables[0])
    print(f"{runs} scripts, one after another: {alone:.1f} s ({alone / runs:.2f} s each)")
    print(f"{runs} runs of one study:          {together:.1f} s ({together / runs:.2f} s each)")
    print(f"ratio: {alone / together:.2f} (target: at least 3)")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:], SCRIPTS)
    else:
        compare()
