"""The doctor's look at the machine: versions that do not go together, memory, disk and threads.

Imports no torch: on a faulty machine that may fail.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, files, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from offsphere.training.settings import TrainSettings

SHARED_MEMORY, DISK = 2**28, 2**30
Verdict = Literal["ok", "warning", "refused", "FAULT"]


class Finding(NamedTuple):
    """What one check found, and what to do about it."""

    check: str
    measured: str
    verdict: Verdict
    remedy: str = ""


def environment(settings: TrainSettings) -> Iterator[Finding]:
    """Versions that do not go together, memory, disk and threads."""
    yield builds({name: _build(name) for name in ("torch", "torchvision")})
    yield pinned(requires("torchvision") or (), version("torch"))
    yield versions(requires("offsphere") or (), version)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else SHARED_MEMORY
    yield shared_memory(free, settings.workers)
    out = next(p for p in (Path(settings.out).absolute(), *Path(settings.out).absolute().parents)
               if p.exists())  # fmt: skip
    yield disk(shutil.disk_usage(out).free)
    yield threads(settings.threads, settings.devices, os.cpu_count() or 1)


def builds(versions: Mapping[str, str]) -> Finding:
    """Whether torch and torchvision were built for the same device, by their version's tag."""
    kinds = {name: _kind(version) for name, version in versions.items()}
    measured = ", ".join(f"{name} {version}" for name, version in versions.items())
    if len(set(kinds.values()) - {""}) < 2:
        return Finding("builds", measured, "ok")
    other = "cpu" if kinds["torch"] == "cpu" else versions["torch"].partition("+")[2]
    remedy = "install both from one index: pip install torch torchvision "
    return Finding(
        "builds", measured, "FAULT", f"{remedy}--index-url=https://download.pytorch.org/whl/{other}"
    )


def pinned(requirements: Iterable[str], torch_version: str) -> Finding:
    """Whether torch is the version that torchvision asks for."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        if requirement.name == "torch":
            good = requirement.specifier.contains(torch_version.partition("+")[0], prereleases=True)
            measured = f"torchvision wants {requirement}, torch is {torch_version}"
            remedy = "" if good else f"pip install '{requirement}'"
            return Finding("torch for torchvision", measured, "ok" if good else "FAULT", remedy)
    return Finding("torch for torchvision", "torchvision names no version", "ok")


def versions(requirements: Iterable[str], installed: Callable[[str], str]) -> Finding:
    """Whether the packages are of the versions that offsphere was tested with."""
    from packaging.requirements import Requirement

    wanted = [x for x in map(Requirement, requirements) if not x.marker or x.marker.evaluate()]
    wrong = []
    for requirement in wanted:
        try:
            found = installed(requirement.name)
        except PackageNotFoundError:
            found = None
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append((requirement, found))
    if not wrong:
        return Finding("versions", f"{len(wanted)} packages as asked for", "ok")
    measured = ", ".join(f"{x.name} {found or 'is missing'}" for x, found in wrong)
    words = " ".join(f"'{requirement}'" for requirement, _ in wrong)
    return Finding("versions", measured, "warning", f"pip install {words}")


def shared_memory(free: int, workers: int) -> Finding:
    """Batches come from worker processes through shared memory."""
    measured = f"{free / 2**20:.0f} MB free, {workers} workers"
    if free >= SHARED_MEMORY or not workers:
        return Finding("shared memory", measured, "ok")
    return Finding(
        "shared memory", measured, "warning", "--workers=0, or a container with --shm-size=2g"
    )


def disk(free: int) -> Finding:
    """Checkpoints are written beside the old ones."""
    good = free >= DISK
    remedy = "" if good else "make room, or another --out: a full disk stops a run"
    measured = f"{free / 2**30:.1f} GB free"
    return Finding("disk", measured, "ok" if good else "warning", remedy)


def threads(each: int, ranks: int, cpus: int) -> Finding:
    """More threads than cores slow each other down."""
    measured = f"{each * ranks} threads of all ranks, {cpus} cores"
    if each * ranks <= cpus:
        return Finding("threads", measured, "ok")
    remedy = f"--threads={cpus // ranks}" if cpus >= ranks else f"--threads=1 --devices={cpus}"
    return Finding("threads", measured, "warning", remedy)


def _build(package: str) -> str:
    """The version with the tag of its build: a wheel's metadata often lacks it, its code does not.

    The file is read, not imported: a mix of builds fails when it is imported."""
    for file in files(package) or ():
        if file.as_posix() == f"{package}/version.py":
            found = re.search(r"__version__ = ['\"]([^'\"]+)", file.read_text())
            return found[1] if found else version(package)
    return version(package)


def _kind(version: str) -> str:
    """cpu, cuda or rocm from a version such as 2.9.0+cu126; nothing if it has no such tag."""
    tag = version.partition("+")[2]
    kinds = {"cpu": "cpu", "cu": "cuda", "rocm": "rocm"}
    return next((kind for start, kind in kinds.items() if tag.startswith(start)), "")
