"""Data sets with a name: where each lies below the data root, and how to get it. No torch.

`--data=cifar10-shards` is what a run's settings say; the root is where this machine keeps data
(`--data-root`, else OFFSPHERE_DATA, else the user's cache) and no part of a run's identity. Each
set, its layout and its making: docs/data.md.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

ROOT_VARIABLE = "OFFSPHERE_DATA"
# Where the committed rows of the first studies had their data: part of those runs' names.
COMMITTED_ROOT = "../shared/data"
BEIR = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")


class Known(NamedTuple):
    """One named data set."""

    kind: str
    """How a lane reads it: wds, beir, stsb or captions."""
    place: str
    """The pattern or folder below the root."""
    files: tuple[str, ...]
    """What must be there, below the root."""
    fingerprint: str
    """`fingerprint` of these files as the committed results have them."""
    make: str
    """How to get it, in a line."""
    test: str | None = None
    """The name of its test data, if they are a set of their own."""
    is_committed: bool = False
    """Whether committed rows name it by its place below COMMITTED_ROOT."""


def _shards(folder: str, *parts: str) -> tuple[str, ...]:
    names = (f"{folder}/{folder}-{part}.tar" for part in parts)
    return (*names, f"{folder}/classnames.txt")


def _below(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


FIVE = "{000000..000004}"
NUMBERED = tuple(f"train-{number:06d}" for number in range(5))
CIFAR10 = "torchvision's CIFAR-10 as jpg + cls in five tar shards and one for test"
TINY = "100 classes of Tiny-ImageNet at 32 pixels, as jpg + cls in tar shards"
FLICKR = "Flickr8k at 128 x 128 pixels, as jpg + json {captions} in one tar per split"
KNOWN = {
    "cifar10-shards": Known(
        "wds",
        f"cifar10/cifar10-train-{FIVE}.tar",
        _shards("cifar10", *NUMBERED),
        "f4187d96853db408",
        CIFAR10,
        "cifar10-shards:test",
        is_committed=True,
    ),
    "cifar10-shards:test": Known(
        "wds",
        "cifar10/cifar10-test-000000.tar",
        _shards("cifar10", "test-000000"),
        "65c8168b2382f2f2",
        CIFAR10,
        is_committed=True,
    ),
    "tinyimagenet32": Known(
        "wds",
        f"tinyimagenet32/tinyimagenet32-train-{FIVE}.tar",
        _shards("tinyimagenet32", *NUMBERED),
        "c256fd23200736f5",
        TINY,
        "tinyimagenet32:test",
    ),
    "tinyimagenet32:test": Known(
        "wds",
        "tinyimagenet32/tinyimagenet32-test-000000.tar",
        _shards("tinyimagenet32", "test-000000"),
        "667ccf60f7737763",
        TINY,
    ),
    "flickr8k-128": Known(
        "wds",
        "flickr8k/flickr8k-128-train.tar",
        _below("flickr8k", "flickr8k-128-train.tar"),
        "0b404ac1c8ec009d",
        FLICKR,
        "flickr8k-128:dev",
        is_committed=True,
    ),
    "flickr8k-128:dev": Known(
        "wds",
        "flickr8k/flickr8k-128-dev.tar",
        _below("flickr8k", "flickr8k-128-dev.tar"),
        "33a1a27b0e30c0d7",
        FLICKR,
        is_committed=True,
    ),
    "scifact": Known(
        "beir",
        "scifact",
        _below("scifact", *BEIR, "qrels/train.tsv"),
        "701881eca3ce83dd",
        "unpack BEIR's scifact.zip",
        is_committed=True,
    ),
    "debian": Known(
        "beir",
        "debian",
        _below("debian", *BEIR, "qrels/train.tsv", "qrels/dev.tsv"),
        "0e6183f014943712",
        "summaries and descriptions of Debian's package index, in BEIR's layout",
    ),
    "npl": Known(
        "beir",
        "npl",
        _below("npl", *BEIR),
        "6b17d2c238b8e993",
        "the NPL (Vaswani) test collection, in BEIR's layout",
    ),
    "cisi": Known(
        "beir",
        "cisi",
        _below("cisi", *BEIR),
        "c29ce111e5707f77",
        "the development half of the CISI test collection, in BEIR's layout",
    ),
    "stsb": Known(
        "stsb",
        "stsb",
        _below("stsb", "sts-train.csv", "sts-dev.csv", "sts-test.csv"),
        "1bda620cd5368847",
        "unpack Stsbenchmark.tar.gz",
        is_committed=True,
    ),
    "multi30k": Known(
        "captions",
        "multi30k",
        _below("multi30k", "train.jsonl", "dev.jsonl", "test.jsonl"),
        "2feb7e767b8db5f6",
        "Multi30k's five English captions of each picture, a JSON object per line",
    ),
}


def _committed(known: Known) -> str:
    return f"{known.kind}:{COMMITTED_ROOT}/{known.place}"


COMMITTED = {name: _committed(known) for name, known in KNOWN.items() if known.is_committed}
ALIASES = {text: name for name, text in COMMITTED.items()}


def named(data: str) -> str:
    """The name of a set that committed rows call by its old place; anything else as it is."""
    return ALIASES.get(data, data)


def identity(data: str) -> str:
    """What stands for these data in a run's hash, so that committed rows keep their names."""
    return COMMITTED.get(data, data)


def kind_of(data: str) -> str:
    """How a lane reads these data: what stands before the colon, or what the name stands for."""
    known = KNOWN.get(named(data))
    return data.partition(":")[0] if known is None else known.kind


def data_root(given: str | Path | None = None) -> Path:
    """The folder of named data on this machine: the flag's, OFFSPHERE_DATA, the user's cache."""
    chosen = given or os.environ.get(ROOT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    from offsphere.run.files import cache_directory

    return (cache_directory() or Path()) / "data"


def missing(data: str, root: str | Path | None = None) -> str | None:
    """What a named set lacks, where it was looked for and how to get it; None if it is whole."""
    known = KNOWN.get(named(data))
    if known is None:
        return None
    folder = data_root(root)
    lost = [file for file in known.files if not (folder / file).exists()]
    if not lost:
        return None
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"{named(data)} is not there: no {lost[0]}{more} in {folder} "
        f"(--data-root or {ROOT_VARIABLE} names another folder). It is {known.make}: docs/data.md."
    )


def resolve(data: str, root: str | Path | None = None) -> str:
    """Where a named set lies, in the form that a lane reads; anything else as it is."""
    if lost := missing(data, root):
        raise FileNotFoundError(lost)
    known = KNOWN.get(named(data))
    return data if known is None else f"{known.kind}:{data_root(root) / known.place}"


def fingerprint(name: str, root: str | Path | None = None) -> str:
    """Sixteen hexadecimal digits of the names and bytes of a set's files."""
    digest = hashlib.sha256()
    for file in KNOWN[name].files:
        with (data_root(root) / file).open("rb") as content:
            digest.update(file.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
