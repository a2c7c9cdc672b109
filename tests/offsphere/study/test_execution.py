"""A worker killed, then the whole study, at random moments: the table is that of a quiet study."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from offsphere.analysis.tables import read_runs
from offsphere.run.config import run_name
from offsphere.run.record import RunFolder

WHEN = ["run/seconds", "run/ended", "commit", "dirty"]
"""What may differ: the clock, and whether someone edits the code meanwhile."""
TOY = """
script: toy
fixed: {steps: 12, pause: 0.05}
seeds: [0, 1, 2, 3, 4, 5]
grid: {cell: [cosine, dot]}
"""
SIMCLR = """
script: train_simclr
fixed: {data: emoji, limit: 256, image_size: 16, batch_size: 32, samples: 1280, log_every: 1,
        checkpoint_every: 7, layer: backbone}
seeds: [0, 1, 2]
grid: {cell: [cosine, dot, qnorm, dnorm]}
"""


def steps_written(study: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in study.glob("*/steps.jsonl"))


def wait_for_steps(study: Path, steps: int, process) -> None:
    while steps_written(study) < steps and process.poll() is None:
        time.sleep(0.005)
    assert process.poll() is None, "the study ended before the kill: give it more steps"


def worker_at_work(study: Path) -> int:
    """The process that holds a run which has no end yet."""
    while True:
        for lock in study.glob("*/.lock"):
            if not RunFolder(lock.parent).metrics() and (pid := lock.read_text()):
                return int(pid)
        time.sleep(0.005)


def kill_twice(launch, study: Path, flags: tuple[str, ...], chance: random.Random) -> None:
    """Kill one worker, then the study itself, each after some more steps of all runs."""
    process = launch.start(*flags)
    wait_for_steps(study, steps_written(study) + chance.randint(1, 30), process)
    time.sleep(chance.uniform(0, 0.1))
    worker = worker_at_work(study)
    os.kill(worker, signal.SIGKILL)
    wait_for_steps(study, steps_written(study) + chance.randint(1, 30), process)
    time.sleep(chance.uniform(0, 0.1))
    process.kill()
    process.communicate()


def disturbed_equals_quiet(launch, tmp_path: Path, text: str, rounds: int, *flags: str) -> None:
    (tmp_path / "example.yaml").write_text(text)
    quiet = launch.run("example.yaml", "--out=quiet", "--workers=2")
    assert quiet[0] == 0, quiet
    chance = random.Random(rounds)
    again = ("example.yaml", "--out=disturbed", "--workers=2", *flags)
    for _ in range(rounds):
        kill_twice(launch, tmp_path / "disturbed/example", again, chance)
    last = launch.run(*again)
    assert last[0] == 0, last
    one, other = (
        read_runs(tmp_path / out / "example/runs.csv").drop(columns=[*WHEN, "out"])
        for out in ("quiet", "disturbed")
    )
    assert len(other) == other["run"].nunique() == 12
    assert set(other["status"]) == {"finished"}
    assert other.equals(one)


def test_kills_leave_no_trace_in_the_table(launch, tmp_path: Path):
    disturbed_equals_quiet(launch, tmp_path, TOY, 1)


def test_a_kill_in_the_middle_of_an_append_is_mended(launch, tmp_path):
    (tmp_path / "example.yaml").write_text(TOY.replace("pause: 0.05", "pause: 0"))
    flags = ("example.yaml", "--workers=2")
    code, _, _ = launch.run(*flags, TORN_APPEND="1")
    assert code == -signal.SIGKILL
    file = tmp_path / "results/example/runs.csv"
    assert not file.read_bytes().endswith(b"\n"), "the last line is torn"
    code, output, errors = launch.run(*flags)
    assert code == 0, errors
    assert "example: 12 runs, 12 finished, 0 failed." in output
    # What was added run by run is, at the end, what reading all run folders anew gives.
    runs = read_runs(file)
    assert list(runs["run"]) == list(dict.fromkeys(runs["run"]))
    assert len(runs) == 12
    final = file.read_bytes()
    file.unlink()
    assert launch.run(*flags)[0] == 0
    assert file.read_bytes() == final


@pytest.mark.slow
def test_many_kills_leave_no_trace_in_the_table(launch, tmp_path: Path):
    disturbed_equals_quiet(launch, tmp_path, TOY.replace("steps: 12", "steps: 60"), 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_leave_no_trace_in_a_study_of_simclr(launch, tmp_path: Path):
    disturbed_equals_quiet(launch, tmp_path, SIMCLR, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_a_study_equals_the_same_command_and_stops_with_a_checkpoint(
    launch, tmp_path: Path
):
    from vision.train_simclr import Config, run

    text = SIMCLR.replace("[0, 1, 2]", "[3]").replace("[cosine, dot, qnorm, dnorm]", "[dot]")
    (tmp_path / "example.yaml").write_text(text.replace("checkpoint_every: 7, ", ""))
    process = launch.start("example.yaml")
    wait_for_steps(tmp_path / "results/example", 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    (file,) = (tmp_path / "results/example").glob("*/checkpoint/last.pt")
    code, _, errors = launch.run("example.yaml")
    assert code == 0, errors
    provenance = RunFolder(file.parents[1]).provenance()
    assert len(provenance["resumed"]) == 1

    config = Config(
        cell="dot",
        seed=3,
        threads=1,
        data="emoji",
        limit=256,
        image_size=16,
        batch_size=32,
        samples=1280,
        log_every=1,
        layer="backbone",
        out=str(tmp_path / "alone"),
    )
    alone = run(config)
    row = read_runs(tmp_path / "results/example/runs.csv").iloc[0]
    assert row["run"] == run_name(config)
    measured = {k: v for k, v in alone.items() if k.startswith(("test/", "train/"))}
    assert {name: row[name] for name in measured} == measured
