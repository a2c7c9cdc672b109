"""What data a run needs: are they there, do they run commands, have they changed? No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.data.shards import existing, expand, is_streamed, shard_paths
from offsphere.run.catalog import KNOWN, data_root, missing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from offsphere.run.record import RunFolder

PATHS = ("wds", "folder", "csv", "beir", "stsb", "captions")
PIPE = "pipe:"


def refuse_missing(runs: Iterable[DataclassInstance]) -> None:
    """One error that names everything that runs with these settings would not find."""
    if lacks := lacking(runs):
        raise FileNotFoundError(" ".join(lacks))


def lacking(runs: Iterable[DataclassInstance]) -> list[str]:
    """Which data of these runs are not there, where they were looked for, how to get them."""
    needed = {(name, _root(settings)): None for settings in runs for name in data_names(settings)}
    sentences = (_lack(name, root) for name, root in needed)
    return [sentence for sentence in sentences if sentence]


def refuse_commands(runs: Iterable[DataclassInstance], *, allowed: bool) -> None:
    """Say which commands the data of runs are; without the user's leave that is an error."""
    commands = list(dict.fromkeys(c for settings in runs for c in _commands(settings)))
    if commands and not allowed:
        raise ValueError(
            f"These data are commands, which would run on this machine: {'; '.join(commands)}. "
            "Give --allow-pipe if you wrote them yourself or trust who did."
        )
    for command in commands:
        print(f"This will run the command: {command}")


def stamp(settings: DataclassInstance) -> str | None:
    """Names, sizes and times of the local files that a run reads, as a short hash.

    Cheap where a fingerprint is not: equal stamps are equal data, and only where they differ (a
    copy has other times) do contents have to be compared. None if nothing local is named.
    """
    digest, root = hashlib.sha256(), _root(settings)
    found = [file for name in data_names(settings) for file in _files(name, root)]
    for file in found:
        facts = file.stat()
        digest.update(repr((file.name, facts.st_size, facts.st_mtime_ns)).encode())
    return digest.hexdigest()[:16] if found else None


def data_names(settings: DataclassInstance) -> list[str]:
    """The data that a run's settings name, each once."""
    values = [getattr(settings, f.name) for f in fields(settings) if f.metadata.get("data")]
    every = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return list(dict.fromkeys(name for name in every if name is not None))


def has_changed(folder: RunFolder, settings: DataclassInstance) -> bool:
    """Whether the files of a run are not as they were, so that contents have to be compared.

    Runs of before there were stamps, and data that are not there now, cannot be told: no.
    """
    before = folder.provenance().get("files")
    return before is not None and stamp(settings) not in (None, before)


def _root(settings: DataclassInstance) -> str | None:
    return getattr(settings, "data_root", None)


def _lack(name: str, root: str | None) -> str | None:
    if name in KNOWN:
        return missing(name, root)
    kind, _, place = name.partition(":")
    if kind not in PATHS or not place or is_streamed(place):
        return None
    try:
        _paths(kind, place)
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {error}"
    return None


def _paths(kind: str, place: str) -> tuple[Path, ...]:
    if kind == "wds":
        return shard_paths(place)
    path = existing(Path(place).expanduser())
    if path.is_dir() == (kind == "csv"):
        found, wanted = ("folder", "file") if kind == "csv" else ("file", "folder")
        raise ValueError(f"it is a {found}, expected a {wanted}.")
    return (path,)


def _files(name: str, root: str | None) -> Iterator[Path]:
    """The local files of a data set, in a fixed order; none if they are not there."""
    kind, _, place = name.partition(":")
    if _lack(name, root) or (name not in KNOWN and (kind not in PATHS or is_streamed(place))):
        return
    if name in KNOWN:
        yield from (data_root(root) / file for file in KNOWN[name].files)
        return
    for path in _paths(kind, place):
        if not path.is_dir():
            yield path
            continue
        for folder, below, files in os.walk(path):
            below.sort()
            yield from (Path(folder) / file for file in sorted(files))


def _commands(settings: DataclassInstance) -> list[str]:
    """What would be run; braces may hide it behind an address."""
    patterns = [name.removeprefix("wds:") for name in data_names(settings) if name[:4] == "wds:"]
    shards = (shard for pattern in patterns if PIPE in pattern for shard in expand(pattern))
    return [shard.removeprefix(PIPE) for shard in shards if shard.startswith(PIPE)]
