"""A run is a folder that explains itself: settings, provenance, steps, metrics. Imports no torch.

JSON has no NaN: non-finite floats are written as the strings "NaN", "Infinity" and "-Infinity",
and `steps()` and `metrics()` turn these three back into floats.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import offsphere
from offsphere.run.addresses import public
from offsphere.run.catalog import with_names
from offsphere.run.config import (
    as_written,
    identity_settings,
    load_yaml,
    run_name,
    telling_name,
    to_yaml,
)
from offsphere.run.files import Lock, write_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PACKAGES = ("torch", "torchvision", "timm", "open_clip_torch", "lightly", "lightning-fabric")
PACKAGES += ("webdataset", "clip-benchmark", "numpy", "scipy", "scikit-learn", "transformers")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunFolder(AbstractContextManager):
    """One run's files: `RunFolder(path)` reads them, `open_run` also locks the folder for writing.

    `state` is the state at opening: new, cut (it has no recorded end), finished or failed.
    """

    def __init__(self, path: str | Path, *, lock: bool = False) -> None:
        self.path = Path(path)
        self.checkpoint = self.path / "checkpoint"
        self._lock = None
        if lock:
            in_use = f"{self.path} is in use by the process {{pid}}: wait for its end, or end it."
            self._lock = Lock(self.path / ".lock", in_use)
        started = (self.path / "config.yaml").exists()
        self.state: str = self._state() if started else "new"
        self._opened, self._seconds_before = time.monotonic(), 0.0

    def _state(self) -> str:
        status = self.metrics().get("run/status", "cut")
        if status not in ("cut", "finished", "failed"):
            file = self.path / "metrics.json"
            raise ValueError(f"{file} is damaged: run/status is {status!r:.40}.")
        return status

    @property
    def seconds(self) -> float:
        """Seconds of work over all sessions, without the work that a kill threw away."""
        return self._seconds_before + time.monotonic() - self._opened

    def log_step(self, row: dict[str, Any]) -> None:
        """Append one row to steps.jsonl, with `run/seconds`; a kill loses no row once written."""
        if "step" not in row:
            raise ValueError(f"A row needs its 'step'; this one has only {sorted(row)}.")
        row = {"step": row["step"], "run/seconds": round(self.seconds, 3), **row}
        _append(self.path / "steps.jsonl", _to_json(row).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """Drop the rows after `step` (the checkpoint's) and a half-written last line."""
        kept = [row for row in self.steps() if row["step"] <= step]
        write_whole(self.path / "steps.jsonl", "".join(_to_json(row) + "\n" for row in kept))
        self._opened = time.monotonic()
        self._seconds_before = kept[-1].get("run/seconds", 0.0) if kept else 0.0

    def steps(self) -> list[dict[str, Any]]:
        """Every complete row of steps.jsonl; a half-written last line is not one."""
        file = self.path / "steps.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        rows = [_from_json(line, f"{file}, line {i}") for i, line in enumerate(lines, 1)]
        for i, row in enumerate(rows, 1):
            step = row.get("step")
            if not isinstance(step, int) or abs(step) >= 2**63:
                raise ValueError(f"{file}, line {i} is damaged: expected a row with its 'step'.")
        return rows

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write metrics.json with `run/status` finished."""
        self._end(metrics, "finished")

    def fail(self, reason: str) -> None:
        """Write metrics.json with `run/status` failed and the reason: a failed run is a row."""
        self._end({"run/reason": reason}, "failed")

    def metrics(self) -> dict[str, Any]:
        """What `finish` or `fail` wrote; empty while the run goes on or when it was cut."""
        return self._read("metrics.json")

    def provenance(self) -> dict[str, Any]:
        """The first start's provenance, and the later ones under `resumed`."""
        return self._read("provenance.json")

    def describe_data(self, data: dict[str, Any], stamp: str | None = None) -> None:
        """Record the data's fingerprint; to resume with other data is an error.

        `stamp` (see needs) tells later at no cost that the files are as they were.
        """
        stored, data = self.provenance(), _from_json(_to_json(data), "data")
        if differ := _differences(stored.get("data"), data):
            raise ValueError(
                f"{self.path} was made with other data: {'; '.join(differ)}. Bring the old data "
                "back, or start anew beside it: --no-resume, another --study or --out."
            )
        self._write("provenance.json", {**stored, "data": data, "files": stamp})

    def discard(self) -> None:
        """Take back a folder that was new when it was opened and in which nothing was begun."""
        if self.state != "new":
            return
        for name in ("config.yaml", "provenance.json", ".lock"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody's file, such as the output of a study's run, stays
            self.checkpoint.rmdir()
            self.path.rmdir()
            self.path.parent.rmdir()

    def close(self) -> None:
        """Let the lock go."""
        if self._lock is not None:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, metrics: dict[str, Any], status: str) -> None:
        end = {"run/status": status, "run/seconds": round(self.seconds, 3), "run/ended": _now()}
        self._write("metrics.json", {**metrics, **end})
        self.state = status

    def _read(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return _from_json(file.read_bytes(), str(file)) if file.exists() else {}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_json(self.path / name, content)


def run_path(
    settings: DataclassInstance, *, script: str, out: str | Path, study: str | None = None
) -> Path:
    """The folder of a run: `<out>/<study>/<cell>-seed<k>-<hash>`, whose table tells runs apart.

    Outside a study it is `<out>/<script>/...` with the settings that differ in the name. A folder
    there that ends in the same hash is that run, whatever stands in between: an older edition or
    other defaults may have named it.
    """
    for flag, given in (("--out", out), ("--study", study)):
        if given == "":
            raise ValueError(f"{flag} is empty: expected a folder's name.")
    if study is not None:
        return Path(out) / study / run_name(settings)
    folder, short = Path(out) / script, run_name(settings)
    start, _, digest = short.rpartition("-")
    telling = folder / telling_name(settings)
    if telling.is_dir() or not folder.is_dir():
        return telling
    alike = (x for x in folder.iterdir() if x.name.startswith(f"{start}-"))
    return min((x for x in alike if x.name.endswith(f"-{digest}")), default=telling)


def find_run(text: str) -> str:
    """The run whose path begins like this, if only one does; several are listed.

    What is no beginning of a run's path comes back as it is, for its reader to refuse.
    """
    path = Path(text.rstrip("*"))
    if (Path(text) / "config.yaml").is_file():
        return text
    beside = (file.parent for file in path.parent.glob("*/config.yaml"))
    alike = (run for run in beside if run.name.startswith(path.name))
    found = sorted(run for run in alike if ".before-" not in run.name)
    if not found:
        return text
    if len(found) == 1:
        return str(found[0])
    raise ValueError(f"{text} may be any of {len(found)} runs; give more of a name:{_told(found)}")


def _told(runs: list[Path], most: int = 20) -> str:
    """Each run with the settings by which it differs from the others, a line each."""
    written = [as_written(run / "config.yaml") for run in runs]
    names = dict.fromkeys(name for settings in written for name in settings)
    varying = [name for name in names if len({x.get(name) for x in written}) > 1]
    lines = [
        f"\n  {run}  " + " ".join(f"{name}={x.get(name)}" for name in varying)
        for run, x in zip(runs[:most], written, strict=False)
    ]
    return "".join(lines) + (f"\n  and {len(runs) - most} more" if len(runs) > most else "")


def open_run(
    settings: DataclassInstance, *, script: str, out: str | Path, study: str | None = None
) -> RunFolder:
    """Open the run's folder (`run_path`) for writing, locked until it is closed."""
    script = Path(script).stem
    path = run_path(settings, script=script, out=out, study=study)
    (path / "checkpoint").mkdir(parents=True, exist_ok=True)
    run = RunFolder(path, lock=True)
    try:
        _check_same_run(run, settings, script)
        for stale in path.rglob(".*.tmp"):
            stale.unlink()
        stored, now = run.provenance(), {"script": script, **provenance(None)}
        if not stored:
            run._write("provenance.json", now)
        elif run.state != "finished":
            before = stored.get("resumed", [])
            before = before if isinstance(before, list) else [before]
            run._write("provenance.json", {**stored, "resumed": [*before, now]})
        if run.state == "new":
            write_whole(path / "config.yaml", to_yaml(settings))
    except BaseException:
        run.close()
        raise
    return run


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write a mapping as JSON, whole or not at all, with non-finite floats as their names."""
    write_whole(path, _to_json(content, indent=2) + "\n")


def provenance(data: dict[str, Any] | None) -> dict[str, Any]:
    """Versions, machine, commit, command and start time: no user, host or absolute path."""
    (commit, dirty), versions = _commit(), {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "started": _now(),
        "command": shlex.join(_without_folders(word) for word in sys.argv),
        "offsphere": offsphere.__version__,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "data": data,
    }


def _differences(before: Any, now: dict[str, Any]) -> list[str]:
    """How two records of data differ, part by part, with both fingerprints."""
    if before is None:
        return []
    before, now = with_names(before), with_names(now)
    if not isinstance(before, dict):
        return [f"they were {before!r:.80}"]
    return [
        f"{part} was {_in_short(before.get(part))} and is {_in_short(now.get(part))}"
        for part in dict.fromkeys([*before, *now])
        if before.get(part) != now.get(part)
    ]


def _in_short(data: Any) -> str:
    if isinstance(data, dict) and "hash" in data:
        return f"{data.get('data')} {data['hash']}"
    return json.dumps(data)


def _check_same_run(run: RunFolder, settings: DataclassInstance, script: str) -> None:
    if run.state == "new":
        return
    old, new = (
        identity_settings(load_yaml(type(settings), run.path / "config.yaml")),
        identity_settings(settings),
    )
    old["script"], new["script"] = run.provenance().get("script", script), script
    differ = [
        f"{name} is {old.get(name)!r} there and {new.get(name)!r} here"
        for name in dict.fromkeys([*new, *old])
        if repr(old.get(name)) != repr(new.get(name))
    ]
    if differ:
        raise ValueError(
            f"{run.path} holds a run of other settings: {'; '.join(differ)}. "
            "Move that folder away, or choose another --out."
        )


def _append(path: Path, line: bytes) -> None:
    """Append a line; the rest of a line that a kill or a full disk left is cut off first."""
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if size and file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "only a part of a row could be written", str(path))


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=_scalar)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, number in NON_FINITE.items() if str(number) == str(value))
    return value


def _scalar(value: Any) -> Any:
    """The plain number of a numpy or torch scalar."""
    if not hasattr(value, "item"):
        raise ValueError(
            f"Expected numbers, strings, lists or mappings, got a {type(value).__name__}."
        )
    return _finite(value.item())


def _from_json(text: str | bytes, source: str) -> dict[str, Any]:
    def revive(pairs: dict[str, Any]) -> dict[str, Any]:
        return {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in pairs.items()}

    try:
        found = json.loads(text, object_hook=revive)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is damaged, it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{source} is damaged: expected names and values, got {found!r:.40}.")
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> tuple[str | None, bool | None]:
    """The commit of this code, and whether tracked files differ from it; none outside a repository.

    What runs write to results/ is no change of the code, though a study's tables are tracked.
    """
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
    differs = [*git, "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)results"]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], **quiet)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], **quiet).stdout.strip()
        return commit, subprocess.run(differs, capture_output=True).returncode != 0
    return None, None


def _cpu() -> str:
    with suppress(OSError):
        if model := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return model[1]
    return platform.processor() or platform.machine()


def _without_folders(word: str) -> str:
    """A command-line word with the folders of absolute paths, and addresses' secrets, left out."""
    return re.sub(r"(?<![\w.~/-])/(?:[^/\s,:=]+/)+", ".../", public(word))
