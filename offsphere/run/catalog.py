"""Data sets with a name: where each lies below the data root, and how to get it. No torch.

`--data=cifar10-shards` is what a run's settings say; the root is where this machine keeps data
(`--data-root`, else OFFSPHERE_DATA, else the user's cache) and no part of a run's identity. Each
set, its layout and its making: docs/data.md.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

ROOT_VARIABLE = "OFFSPHERE_DATA"
# Where the committed rows of the first studies had their data: part of those runs' names.
COMMITTED_ROOT = "../shared/data"
BEIR = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")
STSB = ("sts-train.csv", "sts-dev.csv", "sts-test.csv")
CAPTIONS = ("train.jsonl", "dev.jsonl", "test.jsonl")


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


def _shards(folder: str, part: str, fingerprint: str, make: str, test: str | None = None) -> Known:
    """Labelled pictures in tar shards with class names beside them; train has five shards."""
    numbers, pattern = (range(5), "{000000..000004}") if part == "train" else (range(1), "000000")
    tars = (f"{folder}/{folder}-{part}-{number:06d}.tar" for number in numbers)
    files = (*tars, f"{folder}/classnames.txt")
    place = f"{folder}/{folder}-{part}-{pattern}.tar"
    return Known("wds", place, files, fingerprint, make, test, is_committed=folder == "cifar10")


def _flickr(part: str, fingerprint: str, test: str | None = None) -> Known:
    make = "Flickr8k at 128 x 128 pixels, as jpg + json {captions} in one tar per split"
    place = f"flickr8k/flickr8k-128-{part}.tar"
    return Known("wds", place, (place,), fingerprint, make, test, is_committed=True)


def _folder(kind: str, folder: str, fingerprint: str, make: str, *files: str) -> Known:
    """A folder with files of fixed names."""
    below = tuple(f"{folder}/{file}" for file in files)
    committed = folder in ("scifact", "stsb")
    return Known(kind, folder, below, fingerprint, make, is_committed=committed)


CIFAR = "torchvision's CIFAR-10 as jpg + cls in five tar shards and one for test"
TINY = "100 classes of Tiny-ImageNet at 32 pixels, as jpg + cls in tar shards"
DEBIAN = "summaries and descriptions of Debian's package index, in BEIR's layout"
NPL = "the NPL (Vaswani) test collection, in BEIR's layout"
CISI = "the development half of the CISI test collection, in BEIR's layout"
MULTI30K = "Multi30k's five English captions of each picture, a JSON object per line"
KNOWN = {
    "cifar10-shards": _shards("cifar10", "train", "f4187d96853db408", CIFAR, "cifar10-shards:test"),
    "cifar10-shards:test": _shards("cifar10", "test", "65c8168b2382f2f2", CIFAR),
    "tinyimagenet32": _shards(
        "tinyimagenet32", "train", "c256fd23200736f5", TINY, "tinyimagenet32:test"
    ),
    "tinyimagenet32:test": _shards("tinyimagenet32", "test", "667ccf60f7737763", TINY),
    "flickr8k-128": _flickr("train", "0b404ac1c8ec009d", "flickr8k-128:dev"),
    "flickr8k-128:dev": _flickr("dev", "33a1a27b0e30c0d7"),
    "scifact": _folder(
        "beir", "scifact", "701881eca3ce83dd", "unpack BEIR's scifact.zip", *BEIR, "qrels/train.tsv"
    ),
    "debian": _folder(
        "beir", "debian", "0e6183f014943712", DEBIAN, *BEIR, "qrels/train.tsv", "qrels/dev.tsv"
    ),
    "npl": _folder("beir", "npl", "6b17d2c238b8e993", NPL, *BEIR),
    "cisi": _folder("beir", "cisi", "c29ce111e5707f77", CISI, *BEIR),
    "stsb": _folder("stsb", "stsb", "1bda620cd5368847", "unpack Stsbenchmark.tar.gz", *STSB),
    "multi30k": _folder("captions", "multi30k", "2feb7e767b8db5f6", MULTI30K, *CAPTIONS),
}


COMMITTED = {
    name: f"{known.kind}:{COMMITTED_ROOT}/{known.place}"
    for name, known in KNOWN.items()
    if known.is_committed
}
ALIASES = {text: name for name, text in COMMITTED.items()}


def named(data: str) -> str:
    """The name of a set that committed rows call by its old place; anything else as it is."""
    return ALIASES.get(data, data)


def with_names(record: Any) -> Any:
    """A record of data in which each named set goes by its name, not by its old place."""
    if isinstance(record, dict):
        return {key: with_names(value) for key, value in record.items()}
    if isinstance(record, list):
        return [with_names(value) for value in record]
    return named(record) if isinstance(record, str) else record


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
    """Where a named set lies, in the form that a lane reads; anything else as it is.

    Data that are handed in from Python lie nowhere: they must be handed in again.
    """
    if data.startswith("handed:"):
        raise ValueError(
            f"--data={data} names data that are handed in from Python: call run(config, "
            f"data=Handed(name={data.removeprefix('handed:')!r}, ...))."
        )
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
