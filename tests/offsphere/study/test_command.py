"""Whole studies of the toy script: tables, tuning, faults of single runs, resuming, messages."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from offsphere.analysis.tables import curves_table, examples_table, read_runs
from offsphere.run.record import RunFolder
from offsphere.study import command
from offsphere.study.command import study_command
from offsphere.study.execution import OUTPUT, Ended
from offsphere.study.forecast import Guess, guess_of
from vision.train_simclr import Config as SimClr

SMALL = "script: toy\nseeds: [0, 1]\ngrid: {cell: [cosine, dot]}\nmetric: test/score\n"


@pytest.fixture
def study(toy, tmp_path: Path, monkeypatch, capfd):
    """Runs a study of a YAML text in this process: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def study(text: str, *flags: str) -> tuple[int, str, str]:
        Path("example.yaml").write_text(text)
        code = study_command(["example.yaml", *flags], toy.SCRIPTS)
        return code, *capfd.readouterr()

    return study


def table():
    return read_runs("results/example/runs.csv")


def test_every_run_is_a_row_and_a_second_call_has_nothing_to_do(study, toy):
    code, output, _ = study(SMALL)
    assert code == 0
    assert "example: 4 runs, 4 finished, 0 failed. Table: results/example/runs.csv" in output
    assert output.count(" finished in ") == 4
    rows = table()
    assert list(zip(rows["seed"], rows["cell"], strict=True)) == [
        (0, "cosine"),
        (0, "dot"),
        (1, "cosine"),
        (1, "dot"),
    ]
    for _, row in rows.iterrows():
        config = toy.Config(cell=row["cell"], seed=row["seed"])
        assert row["test/score"] == toy.score(config, 3)
    assert set(rows["status"]) == {"finished"}
    assert set(rows["study"]) == {"example"}

    ended = list(rows["run/ended"])
    code, output, _ = study(SMALL)
    assert code == 0
    assert " finished in " not in output
    assert list(table()["run/ended"]) == ended
    assert Path("results/example/curves.csv.gz").exists()


def test_runs_of_another_study_are_taken_over_when_asked(study, toy):
    assert study(SMALL)[0] == 0
    first = table()
    Path("results/example").rename("results/earlier")
    (cut,) = Path("results/earlier").glob("dot-seed1-*")
    (cut / "metrics.json").unlink()  # not finished: not to be taken
    (other,) = Path("results/earlier").glob("dot-seed0-*")
    record = other / "provenance.json"
    record.write_text(record.read_text().replace('"toy"', '"another script"'))

    plan = study(SMALL, "--reuse", "--dry-run")[1]
    assert "example: 4 runs; 0 finished, 2 taken from other studies, 0 failed, 2 to do." in plan
    assert plan.count("taken from another study: python toy.py --") == 2
    code, output, _ = study(SMALL, "--reuse")
    assert code == 0
    assert "example: 2 runs are taken from other studies in results." in output
    assert output.count(" finished in ") == 2
    rows = table()
    assert set(rows["study"]) == {"example"}
    assert list(rows["test/score"]) == list(first["test/score"])
    cosine = rows["cell"] == "cosine"
    assert list(rows[cosine]["run/seconds"]) == list(first[cosine]["run/seconds"])
    for made in Path("results/earlier").glob("cosine-*"):
        mine = Path("results/example") / made.name
        assert (mine / "steps.jsonl").samefile(made / "steps.jsonl")
        assert "study: example\n" in (mine / "config.yaml").read_text()
        assert not (mine / "config.yaml").samefile(made / "config.yaml")
    assert not list(Path("results").glob(".taking-*"))
    assert "taken" not in study(SMALL, "--reuse")[1]


def without_folders(study: str) -> None:
    """Leave of a study what a clone has of it: its tables."""
    for config in tuple(Path("results", study).rglob("config.yaml")):
        shutil.rmtree(config.parent)


def test_a_clone_goes_on_from_the_rows_of_the_table(study):
    text = f"{SMALL}tune: {{metric: test/score, best: max, seeds: [7], grid: {{lr: [0.1, 0.3]}}}}\n"
    assert study(text)[0] == 0
    first, curves = table(), Path("results/example/curves.csv.gz").read_bytes()
    without_folders("example")

    assert "4 pilot runs and 4 runs; 8 finished, 0 failed, 0 to do." in study(text, "--dry-run")[1]
    code, output, _ = study(text)
    assert code == 0
    for stage in ("example, pilots", "example"):
        assert f"{stage}: 4 runs have ended elsewhere; their rows are in runs.csv.\n" in output
    assert " finished in " not in output
    assert table().equals(first)
    assert Path("results/example/curves.csv.gz").read_bytes() == curves

    more = text.replace("[0, 1]", "[0, 1, 2]")
    assert "toy: 2 to do, about " in (said := study(more, "--dry-run")[1])
    assert "(from 8 finished runs" in said
    assert study(more)[1].count(" finished in ") == 2
    assert table()[:4].equals(first)
    assert list(table()["seed"]) == [0, 0, 1, 1, 2, 2]


def test_a_failed_row_without_a_folder_stays_failed_until_it_is_tried_again(study):
    text = "script: toy\nseeds: [0]\ngrid: {fault: [none, crash]}\n"
    assert study(text)[0] == 1
    without_folders("example")
    code, output, _ = study(text)
    assert code == 1
    assert "2 runs, 1 finished, 1 failed." in output
    assert "RuntimeError: a fault in step 1" in output
    assert " tried again: " not in output
    assert study(text, "--retry-failed")[1].count(" tried again: ") == 1


def test_rows_of_another_study_are_taken_over_without_their_folders(study):
    assert study(SMALL)[0] == 0
    for number, path in enumerate(sorted(Path("results/example").glob("*-seed*"))):
        save_file({"test/hit": np.arange(3.0) + number}, path / "examples.safetensors")
    assert study(SMALL)[0] == 0
    first = table()
    without_folders("example")
    Path("results/example").rename("results/earlier")

    arms = SMALL + "arms: {plain: {}, long: {steps: 4}}\n"
    plan = study(arms, "--reuse", "--dry-run")[1]
    assert "example: 8 runs; 0 finished, 4 taken from other studies, 0 failed, 4 to do." in plan
    code, output, _ = study(arms, "--reuse")
    assert code == 0
    assert "example: 4 runs are taken from other studies in results." in output
    assert output.count(" finished in ") == 4
    assert list(table()["arm"]) == ["plain", "plain", "long", "long"] * 2
    plain = table().query("arm == 'plain'").reset_index(drop=True)
    assert plain[first.columns].equals(first)
    for read, rows in ((curves_table, 24), (examples_table, 12)):
        made = read("results/example").query("run in @first.run").reset_index(drop=True)
        assert made.astype({"run": str}).equals(read("results/earlier").astype({"run": str}))
        assert len(made) == rows
    assert "taken" not in study(arms, "--reuse")[1]


def test_workers_are_kept_and_what_a_run_prints_stays_with_it(study):
    code, output, _ = study(SMALL, "--workers=1")
    assert code == 0
    assert "starts at step" not in output
    said = [(path / "output.txt").read_text() for path in Path("results/example").glob("*-seed*")]
    assert len({line.split("process ")[1] for line in said}) == 1


def test_arms_and_parts_are_columns_and_a_shared_run_has_a_row_in_each(study):
    text = """
script: toy
seeds: [0]
parts:
  - {name: one, arms: {plain: {}, same: {steps: 3}, long: {steps: 9}}}
  - {name: two, fixed: {cell: dot}}
"""
    assert study(text)[0] == 0
    rows = table()
    found = [tuple(row) for row in rows[["part", "arm", "cell", "steps"]].fillna("").to_numpy()]
    assert found == [
        ("one", "plain", "cosine", 3),
        ("one", "same", "cosine", 3),
        ("one", "long", "cosine", 9),
        ("two", "", "dot", 3),
    ]
    assert rows["run"].nunique() == 3
    plan = json.loads(Path("results/example/plan.json").read_text())
    assert set(plan["runs"]) == set(rows["run"])
    assert study(text)[0] == 0
    assert table().equals(rows)

    old = f"{rows['run'][2]}"
    assert study(text.replace(", long: {steps: 9}", ""))[0] == 0
    assert list(table().iloc[-1][["run", "part", "arm"]]) == [old, "one", "long"]


def test_each_arm_is_tuned_on_validation_data_and_the_choice_is_recorded(study):
    text = """
script: toy
seeds: [0, 1]
grid: {cell: [cosine, dot], batch_size: [8, 16]}
tune:
  metric: test/score
  best: max
  seeds: [7, 8]
  fixed: {batch_size: 8}
  grid: {lr: [0.05, 0.1, 0.3]}
"""
    assert study(text)[0] == 0
    rows = table()
    assert set(zip(rows["cell"], rows["lr"], strict=True)) == {("cosine", 0.1), ("dot", 0.3)}
    assert set(rows["eval_split"]) == {"test"}
    assert len(rows) == 8
    pilots = read_runs("results/example/tuning/runs.csv")
    assert set(pilots["eval_split"]) == {"validation"}
    assert set(pilots["seed"]) == {7, 8}
    assert len(pilots) == 2 * 3 * 2
    first, second = json.loads(Path("results/example/tuning.json").read_text())["choices"]
    assert first["for"] == [
        {"cell": "cosine", "batch_size": 8},
        {"cell": "cosine", "batch_size": 16},
    ]
    assert (first["chosen"], second["chosen"]) == ({"lr": 0.1}, {"lr": 0.3})
    means = [candidate["mean"] for candidate in second["candidates"]]
    assert means == pytest.approx([7.5 + 3 / 7 - gap for gap in (0.25, 0.2, 0.0)])


def test_a_candidate_that_fails_is_not_chosen_and_if_all_fail_that_is_said(study):
    text = """
script: toy
seeds: [0]
grid: {cell: [cosine]}
tune: {metric: test/score, best: min, seeds: [7], grid: {fault: [crash, none]}}
"""
    code, output, _ = study(text)
    assert code == 0
    assert list(table()["fault"]) == ["none"]
    for flags in ((), ("--out=elsewhere",)):
        code, output, errors = study(text.replace("[crash, none]", "[crash]"), *flags)
        assert (code, errors) == (1, "")
        assert "not run: every candidate failed in the pilot runs of [{'cell': 'cosine'}]" in output
    code, _, errors = study(text.replace("test/score", "test/scroe"))
    assert code == 1
    assert "tune: metric 'test/scroe' is not measured by toy: expected one of " in errors


def test_a_run_that_fails_is_tried_again_and_then_a_row_with_its_reason(study):
    faults = ["none", "crash", "crash once", "killed", "exit", "diverges"]
    text = f"script: toy\nseeds: [0]\nfixed: {{steps: 3}}\ngrid: {{fault: {faults}}}\n"
    code, output, _ = study(text)
    assert code == 1
    assert "6 runs, 2 finished, 4 failed." in output
    assert output.count(" tried again: ") == 5
    rows = table().set_index("fault")
    assert dict(rows["status"]) == {
        fault: "finished" if fault in ("none", "crash once") else "failed" for fault in faults
    }
    assert rows["reason"]["crash"] == "RuntimeError: a fault in step 1"
    assert rows["reason"]["killed"].startswith("its process was killed by SIGKILL")
    assert rows["reason"]["exit"] == "its process ended with exit code 3"
    assert rows["reason"]["diverges"] == "diverged: the loss is not a number at step 1."
    folder = Path("results/example") / rows["run"]["crash"]
    said = (folder / "output.txt").read_text()
    assert said.count("starts at step") == 2
    assert "starts at step 1 " in said, "it should have resumed from its checkpoint"
    assert "Traceback" in said

    assert " tried again: " not in study(text)[1]
    code, output, _ = study(text, "--retry-failed")
    assert code == 1
    assert output.count(" tried again: ") == 4


def test_a_dry_run_prints_commands_and_a_time_but_starts_nothing(study):
    code, output, _ = study(SMALL, "--dry-run", "--workers=2")
    assert code == 0
    assert "new: python toy.py --cell=dot --seed=1 --threads=1 --study=example\n" in output
    assert "example: 4 runs; 0 finished, 0 failed, 4 to do." in output
    assert "toy: 4 to do; no finished run to estimate the time from." in output
    assert not Path("results").exists()

    study(SMALL)
    for path in sorted(Path("results/example").glob("*-seed*")):
        metrics = RunFolder(path).metrics()
        seconds = 600.0 if path.name.startswith("cosine") else 120.0
        (path / "metrics.json").write_text(json.dumps(metrics | {"run/seconds": seconds}))
    more = SMALL.replace("[0, 1]", "[0, 1, 2]")
    output = study(more, "--dry-run", "--workers=2")[1]
    assert "example: 6 runs; 4 finished, 0 failed, 2 to do." in output
    assert "toy: 2 to do, about 6 min with 2 at a time (from 4 finished runs)." in output


def test_runs_that_are_too_short_tell_no_time():
    config = SimClr(samples=40_000)
    short = {"run/samples": 64, "run/seconds": 40.0}
    long = {"run/samples": 4_000, "run/seconds": 60.0}
    assert guess_of(config, []) is None
    assert guess_of(config, [short]) is None
    assert guess_of(config, [short, long]) == Guess(600.0, [])
    assert guess_of(SimClr(), [short]) == Guess(40.0, [])  # nothing is said of its length


def test_a_time_goes_by_the_runs_most_alike_and_says_in_what_they_differ():
    fast = {"run/samples": 4_000, "run/seconds": 4.0, "backbone": "tiny_resnet", "batch_size": 32}
    slow = {"run/samples": 4_000, "run/seconds": 40.0, "backbone": "resnet50", "batch_size": 256}
    rows = [fast, slow]
    assert guess_of(SimClr(samples=8_000, batch_size=256), [fast]) == Guess(8.0, ["batch_size"])
    assert guess_of(SimClr(samples=8_000, backbone="resnet50", batch_size=256), rows) == Guess(
        80.0, []
    )


def test_a_faulty_file_starts_nothing(study):
    code, _, errors = study(SMALL.replace("script: toy", "script: tyo"))
    assert code == 2
    said = "offsphere study: error: example.yaml: Unknown script 'tyo'. Did you mean 'toy'?\n"
    assert errors == said
    assert not Path("results").exists()


def test_smoke_goes_to_a_folder_of_its_own(study):
    text = f"{SMALL}smoke: {{seeds: [5], fixed: {{steps: 1}}}}\n"
    assert study(text, "--smoke")[0] == 0
    rows = read_runs("results/example_smoke/runs.csv")
    assert list(rows["seed"]) == [5, 5]
    assert not Path("results/example").exists()


def test_a_terminal_gets_a_bar(toy, tmp_path: Path, monkeypatch, launch):
    (tmp_path / "example.yaml").write_text(SMALL)
    ours, theirs = pty.openpty()
    process = launch.start("example.yaml", stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the terminal was closed by the last process that had it
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"4/4" in shown
    assert b"finished in" in shown


LONG = "script: toy\nseeds: [0, 1, 2]\nfixed: {steps: 60, pause: 0.02}\ngrid: {cell: [a, b]}\n"


def wait_for_steps(folder: Path, rows: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if sum(f.read_bytes().count(b"\n") for f in folder.glob("*/steps.jsonl")) >= rows:
            return
        time.sleep(0.01)
    raise AssertionError("the study does not get going")


def test_a_stopped_study_says_how_to_go_on_and_does(launch, tmp_path: Path):
    (tmp_path / "example.yaml").write_text(LONG)
    process = launch.start("example.yaml", "--workers=2", "--out=here")
    wait_for_steps(tmp_path / "here/example", 30)

    second = launch.run("example.yaml", "--out=here")
    assert second[0] == 1
    assert f"here/example is in use by the study of process {process.pid}: wait" in second[2]

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "To resume: offsphere study example.yaml --workers=2 --out=here\n" in errors
    rows = read_runs(tmp_path / "here/example/runs.csv")
    assert "cut" in set(rows["status"])
    code, output, _ = launch.run("example.yaml", "--workers=2", "--out=here")
    assert code == 0
    assert "example: 6 runs, 6 finished, 0 failed." in output


def test_a_study_stopped_before_a_run_began_says_how_to_go_on(study, monkeypatch):
    """The run's folder has what it printed, but no settings yet."""

    class Killed:
        slots = 1

        def start(self, run):
            run.path.mkdir(parents=True)
            (run.path / OUTPUT).touch()
            self.run = run
            signal.raise_signal(signal.SIGTERM)

        def wait(self, _seconds):
            return [Ended(self.run, "its process was killed by SIGTERM")]

        def stop(self):
            pass

        close = stop

    monkeypatch.setattr(command, "_engine", lambda *_: Killed())
    code, output, errors = study(SMALL)
    assert code == 130
    assert "cut: its process was killed by SIGTERM" in output
    assert errors == (
        "Stopped; runs that were at work are cut. To resume: offsphere study example.yaml\n"
    )
    assert not Path("results/example/runs.csv").exists()
