"""Real processes, killed and asked to stop: the resumed run equals the undisturbed one."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offsphere.run.record import RunFolder

TINY = "--data=emoji --limit=250 --batch-size=32 --log-every=1 --threads=1 --checkpoint-every=7"
TINY += " --eval-every=640 --seed=5"
EXTRA = {
    "train_simclr": "--cell=dot --image-size=16 --layer=backbone --keep=best",
    "train_moco": "--cell=learnable --queue-size=96 --image-size=16 --layer=backbone",
    "train_clip": "--cell=txtnorm --eval-split=validation",
}


def flags_of(name: str, out: Path, *flags: str) -> list[str]:
    return [*TINY.split(), *EXTRA[name].split(), f"--out={out}", *flags]


def finished(scripts, name: str, flags: list[str]):
    script = scripts.run(name, *flags)
    assert script.code == 0, script.stderr
    return script


def run_folder(out: Path) -> Path:
    (config,) = out.glob("*/*/config.yaml")
    return config.parent


def rows_written(out: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in out.glob("*/*/steps.jsonl"))


def content(value):
    """Nested states with every tensor as (type, shape, bytes), so that == is bit for bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1).view(torch.uint8) if value.numel() else value
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [content(item) for item in value]
    return value


def rows_of(folder: Path) -> list[dict]:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "run/seconds"} for x in lines]


def numbers(folder: Path) -> dict:
    when = ("run/seconds", "run/ended")
    return {k: v for k, v in RunFolder(folder).metrics().items() if k not in when}


def assert_same_run(one: Path, other: Path) -> None:
    names = sorted(file.name for file in one.glob("*.safetensors"))
    assert len(names) == 2  # the trained weights, and an outcome for every example
    for name in names:
        assert content(load_file(one / name)) == content(load_file(other / name)), name
    states = [torch.load(x / "checkpoint" / "last.pt", weights_only=True) for x in (one, other)]
    assert states[0].keys() == states[1].keys() >= {"step", "method", "optimizers", "facts"}
    for part in states[0]:
        assert content(states[0][part]) == content(states[1][part]), part
    assert rows_of(one) == rows_of(other)
    assert numbers(one) == numbers(other)
    assert numbers(one)["run/status"] == "finished"


def killed_and_resumed(
    scripts, wait_for_rows, name: str, flags: list[str], out: Path, kills: int
) -> None:
    """Kill the run at random moments, each time start it again, and let the last one end."""
    chance = random.Random(kills)
    for number in range(kills):
        script = scripts.start(name, *flags)
        # At a random row of this session, and a random moment before the next one.
        wait_for_rows(script, out, rows_written(out) + chance.randint(1, 9))
        pause = chance.uniform(0, 0.08)
        time.sleep(pause)
        script.signal(signal.SIGKILL)
        print(f"{name}, {flags[-1]}: kill {number}, {pause:.3f} s after row {rows_written(out)}")
        assert script.wait() == -signal.SIGKILL, "it ended before the kill: give it more steps"
    finished(scripts, name, flags)
    assert len(RunFolder(run_folder(out)).provenance()["resumed"]) == kills


def check_kills(
    scripts, wait_for_rows, name: str, tmp_path: Path, *, kills: int, workers: int, samples: int
) -> None:
    # lightly's views are made image by image, in the workers.
    by_workers = workers and name != "train_clip"
    shared = [f"--samples={samples}", *(["--augment=lightly"] if by_workers else [])]
    finished(scripts, name, flags_of(name, tmp_path / "whole", *shared))
    flags = flags_of(name, tmp_path / "cut", *shared, f"--workers={workers}")
    killed_and_resumed(scripts, wait_for_rows, name, flags, tmp_path / "cut", kills)
    assert_same_run(run_folder(tmp_path / "cut"), run_folder(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("name", "workers"),
    [("train_simclr", 0), pytest.param("train_clip", 2, marks=pytest.mark.slow)],
)
def test_two_kills_leave_no_trace(scripts, wait_for_rows, name, workers, tmp_path: Path):
    check_kills(scripts, wait_for_rows, name, tmp_path, kills=2, workers=workers, samples=32 * 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "workers"), list(itertools.product(EXTRA, (0, 2))))
def test_ten_kills_leave_no_trace(scripts, wait_for_rows, name, workers: int, tmp_path: Path):
    check_kills(scripts, wait_for_rows, name, tmp_path, kills=10, workers=workers, samples=32 * 160)


@pytest.mark.parametrize(
    ("number", "group"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
    ids=["TERM", "Ctrl-C", "TERM to the workers too"],
)
def test_a_stopped_run_says_so_and_goes_on(scripts, wait_for_rows, number, group, tmp_path: Path):
    """A terminal's Ctrl-C and a cluster manager's SIGTERM reach the workers too."""
    shared = [f"--samples={32 * 30}", "--augment=lightly"]
    flags = flags_of("train_moco", tmp_path / "cut", *shared, "--workers=1")
    script = scripts.start("train_moco", *flags)
    wait_for_rows(script, tmp_path / "cut", 3)
    script.signal(number, group=group)
    assert script.wait() == 130
    (line,) = script.stderr.splitlines()
    assert line.startswith(f"train_moco: stopped by {number.name} after step ")
    assert line.endswith("The checkpoint is written: the same command resumes from there.")
    cut = run_folder(tmp_path / "cut")
    state = torch.load(cut / "checkpoint" / "last.pt", weights_only=True)
    assert state["step"] == len(rows_of(cut)) == int(line.split(" after step ")[1].split()[0])
    assert RunFolder(cut).metrics() == {}
    finished(scripts, "train_moco", flags)
    finished(scripts, "train_moco", flags_of("train_moco", tmp_path / "whole", *shared))
    assert_same_run(cut, run_folder(tmp_path / "whole"))


def test_a_finished_run_is_not_trained_again_and_can_be_set_aside(scripts, tmp_path: Path):
    flags = flags_of("train_simclr", tmp_path, "--samples=64")
    finished(scripts, "train_simclr", flags)
    folder = run_folder(tmp_path)
    files = ("metrics.json", "steps.jsonl", "provenance.json", "checkpoint/last.pt")
    before = {name: (folder / name).read_bytes() for name in files}
    again = finished(scripts, "train_simclr", flags)
    assert f"{folder} is finished; --no-resume starts it anew.\n" in again.stdout
    assert {name: (folder / name).read_bytes() for name in before} == before

    anew = finished(scripts, "train_simclr", [*flags, "--no-resume"])
    aside = folder.with_name(f"{folder.name}.before-1")
    assert f"The earlier run is kept as {aside}.\n" in anew.stdout
    assert {name: (aside / name).read_bytes() for name in before} == before
    assert_same_run(folder, aside)
    assert "resumed" not in RunFolder(folder).provenance()


def test_a_run_at_work_is_not_moved_away(scripts, wait_for_rows, tmp_path: Path):
    flags = flags_of("train_simclr", tmp_path, f"--samples={32 * 4000}")
    script = scripts.start("train_simclr", *flags)
    wait_for_rows(script, tmp_path, 1)
    for flag in ("--resume", "--no-resume"):
        second = scripts.run("train_simclr", *flags, flag)
        assert second.code == 1
        assert f"is in use by the process {script.pid}" in second.stderr
    script.signal(signal.SIGKILL)
    script.wait()
