"""Tar shards on disk: found by pattern, scanned once, grouped into samples. Imports no torch.

A shard's index (name, offset and size of each member) comes from its tar headers and is kept in the
user's cache, so that samples can be read by offset, in any order, by any number of processes. A
manifest.json beside the shards says how many samples and bytes each of them should have, and their
SHA-256, which is computed once for a file of this size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import tarfile
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from offsphere.data.bad import LEAVE_IT_OUT, BadSamples
from offsphere.run.addresses import check_address, fetch_beside, keep_secret, public, real
from offsphere.run.files import (
    cache_file,
    keep,
    keep_arrays,
    kept_arrays,
    kept_string,
    read_utf8,
)
from offsphere.run.record import write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MANIFEST = "manifest.json"
END_MARK = bytes(1024)
# Smaller shards are scanned in milliseconds: they are not worth an entry in the cache.
CACHED_MEMBERS = 1000
# Larger shards' checksums are kept in the cache, once the file has been at rest for a while: a
# change within the clock's grain would not show in its time.
CACHED_BYTES, AT_REST = 2**24, 60.0
# More shards, or classes, than anybody has: a slip of the pen that would fill the memory.
MOST_SHARDS = 10**6
MOST_CLASSES = 10**6
WRONG_SUM = f"other bytes than those whose SHA-256 {MANIFEST} gives (some are damaged or changed)"
CUT = "is cut short or damaged (it has no end-of-archive mark)"


class Member(NamedTuple):
    """One file inside a tar: its bytes are `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class ShardIndex:
    """The regular files of a shard that are wholly there, in order."""

    path: Path
    members: tuple[Member, ...]
    problem: str | None = None
    """Why the shard is not whole, as a sentence's end."""

    def error(self) -> ValueError:
        """The error for a shard that is not whole."""
        return ValueError(f"The shard {self.path} {self.problem}: fetch it again.")


class ShardFacts(NamedTuple):
    """What a manifest says of one shard."""

    samples: int
    bytes: int | None = None
    sha256: str | None = None


def existing(path: Path) -> Path:
    """The path itself if it exists, else an error that names the nearest parent that does."""
    if path.exists():
        return path
    parent = next((p for p in path.absolute().parents if p.exists()), Path("/"))
    raise FileNotFoundError(
        f"No such file or folder: {path} (the nearest one that exists is {parent})."
    )


def is_streamed(pattern: str) -> bool:
    """Whether a pattern names addresses or commands, whose shards can only be read in order."""
    command_or_file = re.match(r"\s*(pipe|file):", pattern, re.IGNORECASE)
    return command_or_file is not None or "://" in pattern


def expand(pattern: str) -> tuple[str, ...]:
    """A pattern without its braces: train-{000000..000004}.tar names five shards."""
    from braceexpand import braceexpand

    for first, last in re.findall(r"\{(-?\d+)\.\.(-?\d+)", pattern):
        if len(first + last) > 40 or abs(int(last) - int(first)) >= MOST_SHARDS:
            raise ValueError(f"{public(pattern)!r} names more than {MOST_SHARDS:,} shards.")
    try:
        names = tuple(islice(braceexpand(pattern), MOST_SHARDS + 1))
    except ValueError as error:
        said = public(str(error))
        raise ValueError(f"The braces of {public(pattern)!r} do not pair up: {said}.") from None
    if len(names) > MOST_SHARDS:
        raise ValueError(f"{public(pattern)!r} names more than {MOST_SHARDS:,} shards.")
    return names


def shard_paths(pattern: str, bad: BadSamples | None = None) -> tuple[Path, ...]:
    """The local tar files of a pattern with braces or with *.

    A missing one is an error, or reported to `bad` if that is given. Where * is used, the manifest
    tells which files should be there.
    """
    if pattern.startswith("pipe:"):
        raise ValueError(f"{pattern!r}: commands are not run to read data; give local tar files.")
    if is_streamed(pattern):
        raise ValueError(f"{pattern!r}: only local tar files are read; download the shards first.")
    paths: list[Path] = []
    for text in expand(pattern):
        path = Path(text)
        paths += _matches(path) if "*" in path.name else [path]
    if bad is None:
        return tuple(existing(path) for path in paths)
    for path in paths:
        if not path.exists():
            facts = read_manifest(path.parent).get(path.name)
            lost = "" if facts is None else f", and {facts.samples} samples with it"
            samples = 1 if facts is None else facts.samples
            bad.add(f"The shard {path} is missing{lost}.", samples=samples)
    return tuple(path for path in paths if path.exists())


def shard_addresses(pattern: str, *, allow_pipe: bool) -> tuple[str, ...]:
    """The shards of a pattern with braces that names addresses, or commands if these may be run.

    They come without the secrets that the pattern may hold; `fetch` knows these.
    """
    addresses = expand(real(pattern))
    for address in addresses:
        check_address(address)
        if address.startswith("pipe:"):
            if not allow_pipe:
                raise ValueError(
                    f"{public(address)!r} would run a command on this machine: pass --allow-pipe "
                    "if you wrote it yourself or trust who did."
                )
        elif "*" in address:
            raise ValueError(
                f"{public(address)!r}: addresses cannot be listed with *; use {{000000..000004}}."
            )
    shown = tuple(map(keep_secret, addresses))
    if len(set(shown)) < len(shown):
        raise ValueError(
            f"{public(pattern)} names a shard more than once (what follows a ? tells no two "
            "shards apart: it may hold a secret)."
        )
    return shown


def fetch_manifest(address: str) -> dict[str, ShardFacts]:
    """The manifest beside a shard behind an http, https or file address; empty if there is none."""
    content = fetch_beside(address, MANIFEST)
    beside = f"{public(address).rpartition('/')[0]}/{MANIFEST}"
    return {} if content is None else parse_manifest(content, beside)


def _matches(path: Path) -> list[Path]:
    """The files that a name with * stands for, on disk or in the manifest."""
    folder = existing(path.parent)
    names = {file.name for file in folder.glob(path.name)}
    names |= {name for name in read_manifest(folder) if fnmatch(name, path.name)}
    if not names:
        raise FileNotFoundError(f"No file matches {path}.")
    return [folder / name for name in sorted(names)]


def index_shard(path: Path) -> ShardIndex:
    """A shard's index, from the cache if the file is as it was, else from its tar headers."""
    identity, entry = _identity(path), _cache_entry(path, "npz")
    members = _kept_members(entry, identity)
    if members is not None:
        return ShardIndex(path, members)
    index = scan_shard(path)
    if index.problem is None and len(index.members) >= CACHED_MEMBERS:
        _keep_members(entry, identity, index.members)
    return index


def _identity(path: Path) -> tuple[int, int]:
    """A file's size and time of change; a pipe or device would be waited for without end."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        shards = f" A folder's are named with a star: '{path}/*.tar'." if path.is_dir() else ""
        raise ValueError(
            f"{path} is no regular file (a folder, pipe or device): expected a tar.{shards}"
        )
    return facts.st_size, facts.st_mtime_ns


def scan_shard(path: Path) -> ShardIndex:
    """A shard's index from its tar headers; the problem tells if it is not whole."""
    size = path.stat().st_size
    members: list[Member] = []
    try:
        with tarfile.open(path, "r:") as archive:
            while (info := archive.next()) is not None:
                if info.isfile() and info.offset_data + info.size <= size:
                    members.append(Member(info.name, info.offset_data, info.size))
            end = archive.offset
    except tarfile.TarError as error:
        problem = f"is cut short or no uncompressed tar file ({error})"
        return ShardIndex(path, tuple(members), problem)
    with path.open("rb") as file:
        file.seek(end)
        whole = file.read(len(END_MARK)) == END_MARK
    return ShardIndex(path, tuple(members), None if whole else CUT)


def checksum(path: Path) -> str:
    """A file's SHA-256, from the cache if the file is as it was."""
    size, changed = _identity(path)
    entry = _cache_entry(path, "sha256") if size >= CACHED_BYTES else None
    stamp = f"{size} {changed} "
    stored = kept_string(entry)
    if stored.startswith(stamp) and len(stored) == len(stamp) + 64:
        return stored.removeprefix(stamp)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - changed / 1e9 > AT_REST:
        keep(entry, lambda out: out.write((stamp + digest).encode()))
    return digest


def _cache_entry(path: Path, suffix: str) -> Path | None:
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    return cache_file("shards", f"{name}.{suffix}")


def _kept_members(entry: Path | None, identity: tuple[int, int]) -> tuple[Member, ...] | None:
    """The cached members, or None if there are none, they are another file's or damaged."""
    stored = kept_arrays(entry)
    try:
        if tuple(stored["identity"].tolist()) != identity:
            return None
        names = stored["names"].tobytes().decode().split("\0")[:-1]
        places = stored["places"].tolist()
        return tuple(
            Member(name, offset, size) for name, (offset, size) in zip(names, places, strict=True)
        )
    except (ValueError, KeyError, TypeError):
        return None


def _keep_members(
    entry: Path | None, identity: tuple[int, int], members: tuple[Member, ...]
) -> None:
    import numpy as np  # here, because every script's --help reads this module

    names = "".join(f"{member.name}\0" for member in members).encode()
    keep_arrays(
        entry,
        identity=np.array(identity, np.int64),
        names=np.frombuffer(names, np.uint8),
        places=np.array([member[1:] for member in members], np.int64).reshape(len(members), 2),
    )


def key_and_suffix(name: str) -> tuple[str, str] | None:
    """A member's sample and suffix, divided at the first dot; None for a file of no sample."""
    folder, slash, file = name.removeprefix("./").rpartition("/")
    stem, _, suffix = file.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and suffix else None


def is_lost(name: str) -> bool:
    """Whether a member without a suffix may have been meant as data: hidden ones were not."""
    return not any(part.startswith((".", "__")) for part in name.removeprefix("./").split("/"))


def no_suffix(name: str) -> str:
    """What is wrong with a member without a suffix."""
    return f"the member {name!r} has no suffix such as .jpg, so it belongs to no sample."


def kind_of(suffix: str) -> str:
    """What a member is: image, or its last suffix, such as txt, json or cls."""
    last = suffix.rpartition(".")[2]
    return "image" if last in IMAGE_SUFFIXES else last


def samples_of(index: ShardIndex, bad: BadSamples) -> Iterator[tuple[str, dict[str, Member]]]:
    """Each sample's key and its members by kind, in order.

    Of a kind that a key has twice the first member counts; each such key is reported once.
    """
    samples: dict[str, dict[str, Member]] = {}
    reported: set[str] = set()
    for member in index.members:
        found = key_and_suffix(member.name)
        if found is None:
            if is_lost(member.name):
                bad.add(f"{index.path}: {no_suffix(member.name)}", LEAVE_IT_OUT)
            continue
        key, suffix = found
        parts, kind = samples.setdefault(key, {}), kind_of(suffix)
        first = parts.setdefault(kind, member)
        if first is member or key in reported:
            continue
        reported.add(key)
        bad.add(_twice(index.path, key, kind, first, member))
    yield from samples.items()


def _twice(path: Path, key: str, kind: str, first: Member, second: Member) -> str:
    if first.name == second.name:
        return f"{path}: two samples have the key {key!r} ({first.name})."
    what = {"image": "images", "txt": "captions files", "json": "captions files"}.get(kind, kind)
    return f"{path}: the sample {key!r} has two {what} ({first.name}, {second.name})."


def check_shard(index: ShardIndex, facts: ShardFacts | None, samples: int) -> str | None:
    """What is wrong with a shard that holds so many samples, or None."""
    missing = "" if facts is None else f", {facts.samples - samples} of {facts.samples} are missing"
    held = f"{samples} complete samples are left{missing}"
    if index.problem is not None:
        return f"The shard {index.path} {index.problem}: {held}; fetch it again."
    said = None if facts is None else _contradiction(index.path, facts, samples)
    if said is not None:
        return f"The shard {index.path} {said}: fetch it again, or make the manifest anew."
    return None if samples else f"The shard {index.path} holds no samples."


def _contradiction(path: Path, facts: ShardFacts, samples: int) -> str | None:
    """Where a shard differs from what its manifest says; None: nowhere."""
    size = path.stat().st_size
    if facts.bytes not in (None, size):
        return f"has {size:,} bytes, but {MANIFEST} says {facts.bytes:,}"
    if facts.samples != samples:
        return f"holds {samples} samples, but {MANIFEST} says {facts.samples}"
    if facts.sha256 is not None and checksum(path) != facts.sha256.lower():
        return f"has {WRONG_SUM}"
    return None


def read_manifest(folder: Path) -> dict[str, ShardFacts]:
    """What the manifest beside the shards says of each; empty if there is none."""
    file = folder / MANIFEST
    if not file.exists():
        return {}
    _identity(file)
    return parse_manifest(file.read_bytes(), str(file))


def parse_manifest(content: bytes, source: str) -> dict[str, ShardFacts]:
    """A manifest's shards by name: {"shards": {"train-000000.tar": {"samples": 1000, ...}}}."""
    try:
        shards = json.loads(content)["shards"]
        facts = {
            name: ShardFacts(row["samples"], row.get("bytes"), row.get("sha256"))
            for name, row in shards.items()
        }
        if any(type(row.samples) is not int or row.samples < 0 for row in facts.values()):
            raise ValueError("'samples' must be a whole number")
        if any(type(row.bytes) not in (int, type(None)) for row in facts.values()):
            raise ValueError("'bytes' must be a whole number")
        if any(type(row.sha256) not in (str, type(None)) for row in facts.values()):
            raise ValueError("'sha256' must be in quotes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{source} is no manifest of shards ({error!r}): expected "
            '{"shards": {"NAME.tar": {"samples": N, "bytes": N}}}; make it anew or remove it.'
        ) from None
    return facts


def write_manifest(folder: Path, shards: dict[str, ShardFacts]) -> None:
    """Write a manifest beside the shards, whole or not at all."""
    total = sum(facts.samples for facts in shards.values())
    rows = {name: facts._asdict() for name, facts in shards.items()}
    write_json(folder / MANIFEST, {"samples": total, "shards": rows})


def read_member(file: BinaryIO, member: Member) -> bytes:
    """The bytes of one member of an open shard."""
    file.seek(member.offset)
    return file.read(member.size)


def parse_label(content: bytes) -> int:
    """The class index that a .cls member holds."""
    text = content.decode("utf-8", errors="replace").strip()
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"should hold a class index such as 3, got {text[:40]!r}.")
    if len(text.lstrip("0")) > len(str(MOST_CLASSES)) or int(text) >= MOST_CLASSES:
        raise ValueError(f"should hold a class index below {MOST_CLASSES:,}, got {text[:40]}.")
    return int(text)


def class_names(folder: Path, highest: int) -> tuple[str, ...]:
    """Class names from a classnames.txt beside the shards, else the indices up to the highest."""
    file = folder / "classnames.txt"
    if not file.exists():
        return tuple(str(label) for label in range(highest + 1))
    classes = tuple(name.strip() for name in read_utf8(file).split("\n") if name.strip())
    if len(classes) <= highest:
        raise ValueError(
            f"{file} names {len(classes)} classes, but the shards hold class index {highest}."
        )
    return classes
