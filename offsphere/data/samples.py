"""Encoded pictures on disk with what belongs to each: read from tar shards, whatever the lane.

A lane says what a good sample is by `make`: from a sample's members it makes a `Sample` or raises a
`SampleError`. Everything else (cut shards, manifests, doubled keys, reports) is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offsphere.data.bad import READ_REST, BadSamples
from offsphere.data.pictures import Listing, load_pictures
from offsphere.data.shards import (
    IMAGE_SUFFIXES,
    Member,
    ShardFacts,
    ShardIndex,
    check_shard,
    class_names,
    index_shard,
    parse_label,
    read_manifest,
    read_member,
    samples_of,
    shard_paths,
)
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Int, UInt8
    from torch import Tensor

Facts = Mapping[Path, ShardFacts | None]
"""Shards, each with what its manifest says of it."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Pictures on disk with their captions and class indices, where they have them."""

    listing: Listing
    keys: tuple[str, ...]
    captions: tuple[tuple[str, ...], ...] = ()
    labels: Int[np.ndarray, " n"] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.listing)

    def take(self, keep: Sequence[int] | Int[np.ndarray, " k"]) -> Samples:
        """Some of the samples."""
        keep = np.asarray(keep, np.int64)
        return replace(
            self,
            listing=self.listing.take(keep),
            keys=tuple(self.keys[i] for i in keep),
            captions=tuple(self.captions[i] for i in keep) if self.captions else (),
            labels=None if self.labels is None else self.labels[keep],
        )

    def load(
        self, size: int, bad: BadSamples, memory_limit: int
    ) -> tuple[UInt8[Tensor, "k 3 s s"] | Listing, Samples]:
        """All pixels if they fit into memory, else where they lie; and the samples they are of."""
        pixels, keep = load_pictures(self.listing, size, bad, memory_limit)
        kept = self.take(keep)
        return kept.listing if pixels is None else pixels, kept


class Sample(NamedTuple):
    """One sample of a shard."""

    key: str
    image: Member
    label: int | None
    captions: tuple[str, ...] = ()


class SampleError(ValueError):
    """What is wrong with one sample, as a sentence after the shard's name."""


class Parts(NamedTuple):
    """The members of a sample by kind, and how they are read."""

    key: str
    members: Mapping[str, Member]
    read: Callable[[Member], bytes]

    def image(self) -> Member:
        """The picture, if there is one."""
        if "image" not in self.members:
            raise SampleError(f"{self.key} has no image ({', '.join(IMAGE_SUFFIXES)}).")
        return self.members["image"]

    def label(self) -> int | None:
        """The class index, if the sample has a .cls member."""
        if "cls" not in self.members:
            return None
        try:
            return parse_label(self.read(self.members["cls"]))
        except ValueError as error:
            raise SampleError(f"{self.members['cls'].name} {error}") from None


def shard_facts(pattern: str, bad: BadSamples | None = None) -> dict[Path, ShardFacts | None]:
    """The local shards of a pattern, each with what the manifest beside it says."""
    paths = shard_paths(pattern, bad)
    manifests = {folder: read_manifest(folder) for folder in {path.parent for path in paths}}
    return {path: manifests[path.parent].get(path.name) for path in paths}


def has_image(members: Mapping[str, Member]) -> bool:
    """Whether a sample has what every lane needs."""
    return "image" in members


Rows = list[tuple[int, Sample]]
"""Samples, each with the number of its shard."""


def read_shards(
    shards: Facts,
    make: Callable[[Parts], Sample],
    bad: BadSamples,
    *,
    complete: Callable[[Mapping[str, Member]], bool] = has_image,
    index: Callable[[Path], ShardIndex] = index_shard,
) -> Rows:
    """The good samples of shards in order; what is wrong with a shard or sample is reported.

    The last sample of a cut shard is left out if it is not `complete`: the cut took the rest of it.
    """
    rows: Rows = []
    homes: dict[str, Path] = {}
    in_turn = track(shards.items(), len(shards), "indexing shards", unit="shards")
    for number, (path, facts) in enumerate(in_turn):
        found = index(path)
        samples = list(samples_of(found, bad))
        if found.problem is not None and samples and not complete(samples[-1][1]):
            samples.pop()
        problem = check_shard(found, facts, len(samples))
        if problem is not None:
            bad.add(problem, READ_REST)
        with path.open("rb") as file:
            for key, members in samples:
                try:
                    sample = make(Parts(key, members, lambda member: read_member(file, member)))
                except SampleError as error:
                    bad.add(f"{path}: {error}")
                    continue
                home = homes.setdefault(key, path)
                if home is path:
                    rows.append((number, sample))
                else:
                    bad.add(f"Two samples have the key {key!r}: in {home} and in {path}.")
    return rows


def listed(paths: Sequence[Path], rows: Rows) -> Samples:
    """Where the pictures of samples lie; all of them have a label, or none has."""
    numbers = np.array([(n, s.image.offset, s.image.size) for n, s in rows], np.int64)
    file, offsets, sizes = (np.ascontiguousarray(c) for c in numbers.reshape(len(rows), 3).T)
    labels = [sample.label for _, sample in rows if sample.label is not None]
    return Samples(
        Listing(tuple(paths), file, offsets, sizes, tuple(s.image.name for _, s in rows)),
        tuple(sample.key for _, sample in rows),
        tuple(sample.captions for _, sample in rows),
        np.array(labels, np.int64) if labels else None,
        class_names(paths[0].parent, max(labels)) if labels else (),
    )
