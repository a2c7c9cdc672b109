"""Run folders: nothing complete is lost, nothing half is read, and nobody shares a folder."""

import dataclasses
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.run import record
from offsphere.run.config import load_yaml, run_name, settings_hash, unhashed
from offsphere.run.files import atomic_write
from offsphere.run.record import RunFolder, find_run, open_run, provenance, run_path


@dataclass(frozen=True)
class Config:
    cell: str = "cosine"
    seed: int = 0
    lr: float = 0.1
    out: str = unhashed("results")


def open_default(tmp_path: Path, config: Config | None = None) -> RunFolder:
    return open_run(config or Config(), script="vision/train_simclr.py", out=tmp_path)


def child(code: str, *args: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, args)]


def test_a_new_folder_explains_itself(tmp_path):
    config = Config(cell="0.3,0.7", seed=42)
    with open_run(config, script="vision/train_simclr.py", out=tmp_path) as run:
        assert run.path == tmp_path / "train_simclr" / run_name(config)
        assert run.state == "new"
        assert run.checkpoint.is_dir()
        assert load_yaml(Config, run.path / "config.yaml") == config
        stored = json.loads((run.path / "provenance.json").read_text())
        assert (stored["script"], "resumed" in stored) == ("train_simclr", False)
    with open_run(config, script="train_simclr", out=tmp_path, study="pilot") as run:
        assert run.path == tmp_path / "pilot" / run_name(config)


def test_lone_runs_tell_what_differs(tmp_path):
    config = Config(cell="dot", lr=0.5)
    with open_default(tmp_path, config) as run:
        assert run.path.name == f"dot-seed0-lr0.5-{settings_hash(config)}"
    with open_run(config, script="train_simclr", out=tmp_path, study="grid") as run:
        assert run.path == tmp_path / "grid" / run_name(config)


@pytest.mark.parametrize("name", ["out", "study"])
def test_a_folder_needs_a_name(name):
    given = {"out": "results", "study": "mine", name: ""}
    with pytest.raises(ValueError, match=f"--{name} is empty: expected a folder's name"):
        run_path(Config(), script="train_simclr", **given)


def test_a_folder_that_ends_in_the_hash_is_the_run(tmp_path):
    config = Config(cell="dot", lr=0.5)
    old = tmp_path / "train_simclr" / run_name(config)  # as an older edition named it
    with open_default(tmp_path, config) as run:
        run.log_step({"step": 0})
        run.path.rename(old)
    aside = old.with_name(f"{old.name}.before-1")
    aside.mkdir()
    with open_default(tmp_path, config) as run:
        assert run.path == old
        assert [row["step"] for row in run.steps()] == [0]
    assert run_path(Config(cell="dot"), script="train_simclr", out=tmp_path) != old


def test_a_run_is_found_by_the_beginning_of_its_path(tmp_path):
    runs = [Config(cell="dot", lr=lr) for lr in (0.1, 0.2)] + [Config(cell="qnorm")]
    paths = []
    for config in runs:
        with open_default(tmp_path, config) as run:
            paths.append(str(run.path))
    Path(f"{paths[2]}.before-1").mkdir()
    Path(f"{paths[2]}.before-1", "config.yaml").touch()
    folder = tmp_path / "train_simclr"
    assert find_run(paths[0]) == paths[0]
    assert find_run(f"{folder}/qnorm-") == paths[2]
    assert find_run(f"{folder}/q*") == paths[2]
    assert find_run(f"{paths[2]}.before-1") == f"{paths[2]}.before-1"
    for nothing in (f"{folder}/cosine", str(folder), str(tmp_path / "no" / "where")):
        assert find_run(nothing) == nothing
    with pytest.raises(ValueError, match="may be any of 2 runs") as error:
        find_run(f"{folder}/dot-")
    listed = sorted(zip(paths[:2], ("lr=0.1", "lr=0.2"), strict=True))
    assert str(error.value).splitlines()[1:] == [f"  {path}  {told}" for path, told in listed]


def test_windows_is_refused_in_words():
    code = "import sys; sys.modules['fcntl'] = None; import offsphere.training.script"
    ended = subprocess.run(child(code), capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("offsphere: error: Windows is not supported")
    assert ended.stderr.count("\n") == 1


def test_states(tmp_path):
    states = []
    for end in (None, lambda run: run.fail("loss is NaN at step 3"), lambda run: run.finish({})):
        with open_default(tmp_path) as run:
            states.append(run.state)
            if end:
                end(run)
            states.append(run.state)
    with open_default(tmp_path) as run:
        assert states == ["new", "new", "cut", "failed", "failed", "finished"]
        assert run.state == "finished"
        assert len(run.provenance()["resumed"]) == 2


def test_metrics_and_reason(tmp_path):
    with open_default(tmp_path) as run:
        assert run.metrics() == {}
        run.fail("loss is NaN at step 3")
        assert run.metrics()["run/reason"] == "loss is NaN at step 3"
        run.finish({"test/knn": np.float32(0.5), "test/probe": math.nan, "test/top": [1, 2]})
    metrics = RunFolder(run.path).metrics()
    assert math.isnan(metrics.pop("test/probe"))
    seconds, ended = metrics.pop("run/seconds"), metrics.pop("run/ended")
    assert metrics == {"test/knn": 0.5, "test/top": [1, 2], "run/status": "finished"}
    assert 0 <= seconds < 60
    assert ended.endswith("+00:00")


def test_other_settings_in_the_folder_are_told(tmp_path):
    open_default(tmp_path, Config(out="here")).close()
    open_default(tmp_path, Config(out="there")).close()
    with open_default(tmp_path) as run:
        file = run.path / "config.yaml"
    file.write_text(yaml.safe_dump({**dataclasses.asdict(Config()), "lr": 0.5}))
    with pytest.raises(ValueError, match=r"lr is 0\.5 there and 0\.1 here.*Move that folder"):
        open_default(tmp_path)
    file.write_text("lr: 0.1\n")
    open_default(tmp_path).close()
    with pytest.raises(ValueError, match="script is 'train_simclr' there and 'train_moco' here"):
        open_run(Config(), script="train_moco", study="train_simclr", out=tmp_path)


def test_other_data_is_told(tmp_path):
    with open_default(tmp_path) as run:
        run.describe_data({"name": "emoji", "images": 3})
    with open_default(tmp_path) as run:
        run.describe_data({"name": "emoji", "images": 3})
        with pytest.raises(ValueError, match="was made with other data: images was 3 and is 4"):
            run.describe_data({"name": "emoji", "images": 4})
        assert run.provenance()["data"] == {"name": "emoji", "images": 3}


def test_one_process_per_folder(tmp_path):
    code = (
        "import sys; from offsphere.run.record import RunFolder\n"
        "try: RunFolder(sys.argv[1], lock=True)\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    run = open_default(tmp_path)
    with pytest.raises(ValueError, match=f"in use by the process {os.getpid()}: wait"):
        open_default(tmp_path)
    told = subprocess.run(child(code, run.path), capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr.count("in use by the process")) == (1, 1)
    del run
    again = open_default(tmp_path)
    again.close()
    subprocess.run(child(code, again.path), check=True)


def test_a_worker_that_outlives_a_killed_trainer_does_not_keep_the_lock(tmp_path):
    code = (
        "import os, sys, time; from offsphere.run.record import RunFolder\n"
        "run = RunFolder(sys.argv[1], lock=True)\n"
        "worker = os.fork()\n"
        "if worker == 0: time.sleep(60)\n"
        "print(worker, flush=True); time.sleep(60)"
    )
    trainer = subprocess.Popen(child(code, tmp_path), stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    try:
        time.sleep(0.1)
        with pytest.raises(ValueError, match="in use"):
            RunFolder(tmp_path, lock=True)
        trainer.kill()
        trainer.wait()
        os.kill(worker, 0)
        RunFolder(tmp_path, lock=True).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.stdout.close()


ROWS = st.lists(
    st.dictionaries(st.text("ab/", min_size=1), st.floats(), max_size=3), max_size=8
).map(lambda rows: [{"step": i, "run/seconds": i / 4, **row} for i, row in enumerate(rows)])


@settings(max_examples=40)
@given(ROWS, st.integers(-1, 9), st.binary(max_size=9).filter(lambda b: b"\n" not in b))
def test_rows_come_back_and_rewind_keeps_the_beginning(tmp_path_factory, rows, step, torn):
    run = RunFolder(tmp_path_factory.mktemp("run"))
    for row in rows:
        run.log_step(row)
    assert repr(run.steps()) == repr(rows)
    for line in (run.path / "steps.jsonl").read_text().splitlines() if rows else ():
        json.loads(line, parse_constant=pytest.fail)
    with (run.path / "steps.jsonl").open("ab") as file:
        file.write(torn)
    assert repr(run.steps()) == repr(rows)
    run.rewind(step)
    assert repr(run.steps()) == repr(rows[: step + 1])
    before = rows[: step + 1][-1]["run/seconds"] if rows[: step + 1] else 0.0
    assert before <= run.seconds < before + 5


def test_a_torn_line_is_cut_off_before_the_next_row(tmp_path):
    run = RunFolder(tmp_path)
    run.log_step({"step": 1, "train/loss": np.float64(2.5), "seen": np.int64(7)})
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "train')
    run.log_step({"step": 2, "train/loss": math.inf})
    first, second = run.steps()
    assert (first["train/loss"], first["seen"], second["train/loss"]) == (2.5, 7, math.inf)


def test_bad_rows_and_damaged_files_are_named(tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="needs its 'step'"):
        run.log_step({"train/loss": 1.0})
    with pytest.raises(ValueError, match="got a object"):
        run.log_step({"step": 1, "train/loss": object()})
    assert run.steps() == []
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"steps\.jsonl, line 2 is damaged"):
        run.steps()


def test_killed_at_random_moments_no_complete_row_is_lost(tmp_path):
    code = (
        "import sys; from offsphere.run.record import RunFolder\n"
        "run = RunFolder(sys.argv[1], lock=True); run.rewind(int(sys.argv[2]))\n"
        "step = int(sys.argv[2])\n"
        "while True:\n"
        "    step += 1\n"
        "    run.log_step({'step': step, 'square': step**2, 'pad': 'x' * 5000})\n"
        "    print(step, flush=True)"
    )
    moments, checkpoint = random.Random(0), 0
    for _ in range(6):
        writer = subprocess.Popen(child(code, tmp_path, checkpoint), stdout=subprocess.PIPE)
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(moments.uniform(0, 0.03))
        writer.kill()
        told = [int(line) for line in (first + writer.stdout.read()).split(b"\n")[:-1]]
        writer.wait()
        writer.stdout.close()
        rows = RunFolder(tmp_path).steps()
        steps = [row["step"] for row in rows]
        assert steps == list(range(1, len(steps) + 1))
        assert all(row["square"] == row["step"] ** 2 for row in rows)
        assert steps[-1] - told[-1] in (0, 1)
        checkpoint = moments.randint(0, steps[-1])


def write(text: bytes):
    return lambda file: file.write(text)


def test_atomic_write_replaces_the_whole_file(tmp_path):
    file = tmp_path / "metrics.json"
    for text in (b"a long first content", b"short"):
        atomic_write(file, write(text))
        assert file.read_bytes() == text
    assert [*tmp_path.iterdir()] == [file]


def test_atomic_write_keeps_the_old_file_on_any_error(tmp_path):
    file = tmp_path / "metrics.json"
    atomic_write(file, write(b"old"))

    def interrupted(stream):
        stream.write(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(file, interrupted)
    assert file.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [file]
    with pytest.raises(FileNotFoundError, match=r"missing.metrics\.json"):
        atomic_write(tmp_path / "missing" / "metrics.json", write(b"new"))


FULL_DISK = (
    "import resource, sys; from offsphere.run.record import RunFolder\n"
    "from offsphere.run.files import atomic_write\n"
    "run = RunFolder(sys.argv[1]); limit = int(sys.argv[2])\n"
    "if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
    "for write in (\n"
    "    lambda: atomic_write(run.path / 'state', lambda file: file.write(bytes(10**6))),\n"
    "    lambda: [run.log_step({'step': i, 'pad': 'x' * 999}) for i in range(10**4)],\n"
    "):\n"
    "    try: write()\n"
    "    except OSError as error: print(error.errno, error)\n"
)


def check_full_disk(folder: Path, told: str) -> None:
    atomic, rows = told.splitlines()
    assert "what was there is intact" in atomic
    assert "state" in atomic
    assert "steps.jsonl" in rows or "No space left" in rows or "too large" in rows
    assert (folder / "state").read_bytes() == b"old"
    assert not [*folder.glob(".*.tmp")]
    steps = [row["step"] for row in RunFolder(folder).steps()]
    assert steps == list(range(len(steps)))
    assert len(steps) > 10


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path):
    (tmp_path / "state").write_bytes(b"old")
    told = subprocess.run(
        child(FULL_DISK, tmp_path, 100_000), capture_output=True, text=True, check=True
    )
    check_full_disk(tmp_path, told.stdout)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_full_disk_leaves_the_old_file(tmp_path):
    if not shutil.which("unshare"):
        pytest.skip("needs unshare to mount a small disk")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=200k tmpfs {disk} && printf old > {disk}/state"
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    if subprocess.run([*namespace, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a user mount a small disk")
    script = f'{mount}; "$0" "$@"; cp -r {disk} {copy}'
    told = subprocess.run(
        [*namespace, script, *child(FULL_DISK, disk, 0)], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("28 ")
    check_full_disk(copy, told.stdout)


def test_stale_temporaries_are_swept(tmp_path):
    with open_default(tmp_path) as run:
        stale = [run.path / ".metrics.json.1.tmp", run.checkpoint / ".state.1.tmp"]
    for file in stale:
        file.write_bytes(b"half")
    open_default(tmp_path).close()
    assert not any(file.exists() for file in stale)


def test_provenance_tells_the_machine_and_no_secrets(tmp_path, monkeypatch):
    argv = [
        str(tmp_path / "train.py"),
        "--cell=dot",
        "--data=folder:/data/someone/pictures",
        "/a/b",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    facts = provenance({"name": "emoji"})
    assert facts["command"] == ".../train.py --cell=dot --data=folder:.../pictures .../b"
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["python"] == sys.version.split()[0]
    assert facts["cpus"] == os.cpu_count()
    assert 0.1 < facts["memory_gb"] < 2**20
    assert facts["data"] == {"name": "emoji"}
    text = json.dumps(facts)
    secrets = [os.uname().nodename, str(Path.home()), str(tmp_path), str(Path.cwd())]
    assert not [secret for secret in secrets if len(secret) > 2 and secret in text]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    code = tmp_path / "record.py"
    monkeypatch.setattr(record, "__file__", str(code))
    code.write_text("1")
    facts = [provenance(None)]
    git(tmp_path, "init")
    facts.append(provenance(None))
    table = tmp_path / "results" / "study" / "runs.csv"
    table.parent.mkdir(parents=True)
    table.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "v1")
    facts.append(provenance(None))
    table.write_text("2")
    facts.append(provenance(None))
    code.write_text("2")
    facts.append(provenance(None))
    commit = git(tmp_path, "rev-parse", "HEAD")
    wanted = [(None, None), (None, None), (commit, False), (commit, False), (commit, True)]
    assert [(fact["commit"], fact["dirty"]) for fact in facts] == wanted


def test_neither_torch_nor_pandas_is_imported():
    code = (
        "import sys, offsphere.run.record, offsphere.run.config\n"
        "offsphere.run.record.provenance(None)\n"
        "assert not {'torch', 'pandas', 'numpy', 'tyro'} & set(sys.modules)"
    )
    subprocess.run(child(code), check=True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.json", "[" * 100_000, "is damaged, it is not JSON"),
        ("metrics.json", "[1]", r"is damaged: expected names and values, got \[1\]"),
        (
            "metrics.json",
            '{"run/status": "done"}',
            "is damaged: run/status is 'done'",
        ),
        ("metrics.json", '{"run/status": ["finished"]}', r"run/status is \['finished'\]"),
        (
            "steps.jsonl",
            '{"loss": 1}\n',
            "steps.jsonl, line 1 is damaged: expected a row with its 'step'",
        ),
        ("steps.jsonl", '{"step": "x"}\n', "expected a row with its 'step'"),
    ],
)
def test_an_edited_record_is_one_line(tmp_path, file, content, said):
    (tmp_path / "config.yaml").write_text("cell: dot\n")
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=said) as refusal:
        RunFolder(tmp_path).steps()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.json", "[1]", "expected names and values"),
        ("metrics.json", "null", "expected names and values"),
        ("metrics.json", '{"run/status": 3}', "run/status is 3"),
        ("metrics.json", "[" * 100_000, "metrics.json is damaged, it is not JSON"),
        ("metrics.json", "\udcff", "is damaged"),
    ],
)
def test_an_edited_record(name, content, said, tmp_path):
    (tmp_path / "config.yaml").write_text("cell: dot\n")
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=said):
        RunFolder(tmp_path)


@pytest.mark.parametrize("row", ["[1]", '{"loss": 1}', '{"step": "3"}'])
def test_an_edited_row(row, tmp_path):
    (tmp_path / "steps.jsonl").write_text(json.dumps({"step": 0}) + f"\n{row}\n")
    with pytest.raises(ValueError, match="steps.jsonl, line 2 is damaged"):
        RunFolder(tmp_path).rewind(0)
