"""Studies on a real Ray cluster on this machine: a worker killed, a node removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offsphere.analysis.tables import read_runs
from offsphere.run.record import RunFolder

pytest.importorskip("ray", reason="Ray is the extra `cluster`")
MAY_DIFFER = ["run/seconds", "run/ended", "commit", "dirty", "out"]
STUDY = """
script: toy
fixed: {steps: 10, pause: 0.05}
seeds: [0, 1, 2, 3, 4, 5]
grid: {cell: [cosine, dot]}
"""
TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(second, allow_graceful=False)
print("removed", flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


def workers_at_work(study: Path, count: int) -> list[int]:
    """The processes that hold runs which have no end yet but a step behind them."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        runs = [RunFolder(lock.parent) for lock in study.glob("*/.lock")]
        at_work = [run for run in runs if run.steps() and not run.metrics()]
        if len(at_work) >= count:
            return [int((run.path / ".lock").read_text()) for run in at_work]
        time.sleep(0.01)
    raise AssertionError("the study does not get going")


def expect_quiet_table(process: subprocess.Popen[str], launch, folder: Path, runs: int) -> None:
    """The disturbed study finishes, and its table is that of a quiet one on the local engine."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert " tried again: its worker was lost (" in output
    assert launch.run("example.yaml", "--out=quiet", "--workers=2")[0] == 0
    disturbed, quiet = (
        read_runs(folder / out / "example/runs.csv").drop(columns=MAY_DIFFER)
        for out in ("results", "quiet")
    )
    assert len(disturbed) == disturbed["run"].nunique() == runs
    assert set(disturbed["status"]) == {"finished"}
    assert disturbed.equals(quiet)


@pytest.mark.slow
def test_a_killed_worker_costs_no_run(launch, tmp_path: Path):
    (tmp_path / "example.yaml").write_text(STUDY)
    process = launch.start("example.yaml", "--engine=ray", "--workers=2")
    study = tmp_path / "results/example"
    os.kill(workers_at_work(study, 1)[0], signal.SIGKILL)
    expect_quiet_table(process, launch, tmp_path, 12)


@pytest.mark.slow
def test_a_stopped_study_leaves_ray_and_goes_on(launch, tmp_path: Path):
    (tmp_path / "example.yaml").write_text(STUDY.replace("steps: 10", "steps: 30"))
    process = launch.start("example.yaml", "--engine=ray", "--workers=2")
    workers_at_work(tmp_path / "results/example", 1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    code, output, errors = launch.run("example.yaml", "--workers=2")
    assert code == 0, errors
    assert "example: 12 runs, 12 finished, 0 failed." in output


@pytest.mark.slow
def test_a_removed_node_costs_no_run(launch, tmp_path: Path):
    """The second node is taken away while the study runs on it; the first one ends it."""
    long = STUDY.replace("steps: 10", "steps: 200").replace("2, 3, 4, 5]", "2]")
    (tmp_path / "example.yaml").write_text(long)
    cluster = subprocess.Popen(
        [sys.executable, "-c", TWO_NODES],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        assert address, "the cluster did not start"
        process = launch.start("example.yaml", "--engine=ray", RAY_ADDRESS=address)
        workers_at_work(tmp_path / "results/example", 2)  # the first node has one CPU
        cluster.stdin.write("remove\n")
        cluster.stdin.flush()
        assert cluster.stdout.readline() == "removed\n"
        expect_quiet_table(process, launch, tmp_path, 6)
    finally:
        cluster.communicate("end\n", timeout=120)
