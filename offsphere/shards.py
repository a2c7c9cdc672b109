"""Tar shards on disk: found by pattern, scanned once, grouped into samples. Imports no torch.

A shard's index (name, offset and size of each member) comes from its tar headers and is kept in the
user's cache, so that samples can be read by offset, in any order, by any number of processes. A
manifest.json beside the shards says how many samples and bytes each of them should have.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import numpy as np

from offsphere.emoji import cache_directory
from offsphere.names import unknown
from offsphere.record import atomic_write, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

ON_BAD_SAMPLE = ("error", "skip")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MANIFEST = "manifest.json"
END_MARK = bytes(1024)
# Smaller shards are scanned in milliseconds: they are not worth an entry in the cache.
CACHED_MEMBERS = 1000
CUT = "is cut short or damaged (it has no end-of-archive mark)"


class BadSamples:
    """Stops at the first bad sample, or collects them, as the user asked."""

    def __init__(self, on_bad_sample: str) -> None:
        if on_bad_sample not in ON_BAD_SAMPLE:
            raise unknown("value of on_bad_sample", on_bad_sample, ON_BAD_SAMPLE)
        self.skip = on_bad_sample == "skip"
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Report one bad sample."""
        if not self.skip:
            raise ValueError(f"{message} (--on-bad-sample=skip leaves such samples out.)")
        self.messages.append(message)


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
    return pattern.startswith(("pipe:", "file:")) or "://" in pattern


def expand(pattern: str) -> tuple[str, ...]:
    """A pattern without its braces: train-{000000..000004}.tar names five shards."""
    from braceexpand import braceexpand

    try:
        return tuple(braceexpand(pattern))
    except ValueError as error:
        raise ValueError(f"The braces of {pattern!r} do not pair up: {error}.") from None


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
            bad.add(f"The shard {path} is missing{lost}.")
    return tuple(path for path in paths if path.exists())


def shard_addresses(pattern: str, *, allow_pipe: bool) -> tuple[str, ...]:
    """The shards of a pattern with braces that names addresses, or commands if these may be run."""
    addresses = expand(pattern)
    for address in addresses:
        if address.startswith("pipe:"):
            if not allow_pipe:
                raise ValueError(
                    f"{address!r} would run a command on this machine: pass --allow-pipe if you "
                    "wrote it yourself or trust who did."
                )
        elif "*" in address:
            raise ValueError(
                f"{address!r}: addresses cannot be listed with *; use {{000000..000004}}."
            )
    return addresses


def fetch(address: str) -> BinaryIO:
    """An open shard behind an address (webdataset's schemes, such as https: and file:)."""
    from webdataset.gopen import gopen

    try:
        return cast("BinaryIO", gopen(address))
    except (OSError, ValueError) as error:
        raise OSError(f"The shard {address} cannot be opened: {error}.") from error


def fetch_manifest(address: str) -> dict[str, ShardFacts]:
    """The manifest beside a shard behind an http, https or file address; empty if there is none."""
    import urllib.error
    import urllib.request

    if not address.startswith(("http://", "https://", "file:")):
        return {}
    manifest = f"{address.rpartition('/')[0]}/{MANIFEST}"
    try:
        with urllib.request.urlopen(manifest, timeout=30) as response:
            return parse_manifest(response.read(), manifest)
    except urllib.error.HTTPError as error:
        if error.code in (403, 404, 410):  # object stores answer 403 for what is not there
            return {}
        raise OSError(f"{manifest} cannot be fetched: {error}.") from error
    except urllib.error.URLError as error:
        if address.startswith("file:"):
            return {}
        raise OSError(f"{manifest} cannot be fetched: {error.reason}.") from error


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
    facts = path.stat()
    identity = (facts.st_size, facts.st_mtime_ns)
    entry = _cache_entry(path)
    members = None if entry is None else _read_entry(entry, identity)
    if members is not None:
        return ShardIndex(path, members)
    index = scan_shard(path)
    if entry is not None and index.problem is None and len(index.members) >= CACHED_MEMBERS:
        _write_entry(entry, identity, index.members)
    return index


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


def _cache_entry(path: Path) -> Path | None:
    folder = cache_directory()
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    return None if folder is None else folder / "shards" / f"{name}.npz"


def _read_entry(entry: Path, identity: tuple[int, int]) -> tuple[Member, ...] | None:
    """The cached members, or None if there are none, they are another file's or damaged."""
    try:
        with entry.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if tuple(stored["identity"].tolist()) != identity:
                return None
            names = stored["names"].tobytes().decode().split("\0")[:-1]
            places = stored["places"].tolist()
        return tuple(
            Member(name, offset, size) for name, (offset, size) in zip(names, places, strict=True)
        )
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile):
        return None


def _write_entry(entry: Path, identity: tuple[int, int], members: tuple[Member, ...]) -> None:
    """Store an index in one step; a cache that cannot be written is done without."""
    names = "".join(f"{member.name}\0" for member in members).encode()
    places = np.array([member[1:] for member in members], np.int64).reshape(len(members), 2)

    def write(file: BinaryIO) -> None:
        np.savez(
            file,
            identity=np.array(identity, np.int64),
            names=np.frombuffer(names, np.uint8),
            places=places,
        )

    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(entry, write)


def key_and_suffix(name: str) -> tuple[str, str] | None:
    """A member's sample and suffix, divided at the first dot; None for a file of no sample."""
    folder, slash, file = name.removeprefix("./").rpartition("/")
    stem, _, suffix = file.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and suffix else None


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
    if facts is None:
        return None
    size = index.path.stat().st_size
    if facts.bytes not in (None, size):
        said = f"has {size:,} bytes, but {MANIFEST} says {facts.bytes:,}"
        return f"The shard {index.path} {said}: fetch it again, or make the manifest anew."
    if facts.samples != samples:
        said = f"holds {samples} samples, but {MANIFEST} says {facts.samples}"
        return f"The shard {index.path} {said}: fetch it again, or make the manifest anew."
    return None


def read_manifest(folder: Path) -> dict[str, ShardFacts]:
    """What the manifest beside the shards says of each; empty if there is none."""
    file = folder / MANIFEST
    return parse_manifest(file.read_bytes(), str(file)) if file.exists() else {}


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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    return int(text)


def class_names(folder: Path, highest: int) -> tuple[str, ...]:
    """Class names from a classnames.txt beside the shards, else the indices up to the highest."""
    file = folder / "classnames.txt"
    if not file.exists():
        return tuple(str(label) for label in range(highest + 1))
    lines = file.read_text(encoding="utf-8").split("\n")
    classes = tuple(name.strip() for name in lines if name.strip())
    if len(classes) <= highest:
        raise ValueError(
            f"{file} names {len(classes)} classes, but the shards hold class index {highest}."
        )
    return classes
