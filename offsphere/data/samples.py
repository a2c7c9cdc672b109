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
from offsphere.data.pictures import (
    PICTURE_SUFFIXES,
    Listing,
    list_files,
    load_pictures,
    pictures_below,
    relative,
)
from offsphere.data.shards import (
    IMAGE_SUFFIXES,
    Member,
    ShardFacts,
    ShardIndex,
    check_shard,
    class_names,
    existing,
    index_shard,
    parse_label,
    read_manifest,
    read_member,
    samples_of,
    shard_paths,
)
from offsphere.data.splits import carve, parts_of_split, split_of
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Int, UInt8
    from torch import Tensor

FOLDER_SPLITS = {
    "train": ("train",),
    "validation": ("val", "valid", "validation"),
    "test": ("test",),
}
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
        """The samples that can be used, and before them their pixels or, if these do not fit into
        memory, where the pictures lie."""
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
            lost = 1 if facts is None else facts.samples - len(samples)
            bad.add(problem, READ_REST, samples=max(1, lost))
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


def list_folder(folder: str, split: str, bad: BadSamples) -> Samples:
    """Pictures in class folders, below train/ val/ test/ if the folder has these."""
    path = existing(Path(folder))
    parts = {
        name: next((path / s for s in spellings if (path / s).is_dir()), None)
        for name, spellings in FOLDER_SPLITS.items()
    }
    if parts["train"] is None:
        classes, found = _class_folders([path], bad)
        wanted = parts_of_split(split)
        chosen = [
            (file, label) for file, label in found if split_of(relative(file, path)) in wanted
        ]
        return _folder_samples(path, chosen, classes, bad)
    present = [part for part in parts.values() if part is not None]
    classes, found = _class_folders(present, bad)
    sources, carved = _folder_sources(parts, split)
    chosen = [(file, label) for file, label in found if any(s in file.parents for s in sources)]
    if carved:
        keys = (relative(file, path) for file, _ in chosen)
        chosen = [chosen[i] for i in carve(keys, split)]
    return _folder_samples(path, chosen, classes, bad)


def _folder_sources(parts: dict[str, Path | None], split: str) -> tuple[list[Path], bool]:
    """The folders that make up a split, and whether it is carved out of train."""
    train, validation, test = (parts[name] for name in ("train", "validation", "test"))
    # With train/ and val/ only, as in ImageNet, val/ is the test split.
    if test is None:
        validation, test = None, validation
    if split == "all":
        return [part for part in parts.values() if part], False
    if split == "test":
        if test is None:
            raise ValueError(
                f"{train} has neither test/ nor val/ beside it: add one, or take away the level "
                "train/ so that the pictures are divided by a hash."
            )
        return [test], False
    wanted = {"train": [train], "validation": [validation], "train+validation": [train, validation]}
    sources = [part for part in wanted[split] if part]
    if validation is None:
        return ([train] if train else []), True
    return sources, False


def _class_folders(
    parts: Sequence[Path], bad: BadSamples
) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Class names over all parts, and each picture with its label, in sorted order."""
    # Pictures without class folders are one class, which has no name.
    folders = (d for part in parts for d in part.iterdir() if d.is_dir())
    names = sorted({d.name for d in folders if not d.name.startswith(".")}) or [""]
    pictures = []
    for part in parts:
        for label, name in enumerate(names):
            if (part / name).exists():
                pictures += [(file, label) for file in pictures_below(part / name, bad)]
        for file in pictures_below(part, bad, deep=False) if names != [""] else ():
            bad.add(f"{file} lies outside the class folders ({', '.join(names[:3])}, ...).")
    if not pictures:
        looked = ", ".join(map(str, parts))
        raise ValueError(f"No pictures in {looked}: expected {', '.join(PICTURE_SUFFIXES)} files.")
    return tuple(names), pictures


def _folder_samples(
    folder: Path, found: list[tuple[Path, int]], classes: tuple[str, ...], bad: BadSamples
) -> Samples:
    listing, kept = list_files(folder, (file for file, _ in found), bad)
    labels = np.array([found[i][1] for i in kept], np.int64)
    return Samples(listing, listing.members, labels=labels, classes=classes)


def list_shards(pattern: str, split: str, bad: BadSamples) -> Samples:
    """Pictures in tar shards, each with a .cls member that holds its class index.

    If the first shard has no such member at all, the pictures have no classes.
    """
    if split == "test":
        raise ValueError(
            f"The shards {pattern} have no test split of their own: name the test shards with "
            "--data-test=wds:PATTERN (they are read with split='all')."
        )
    shards = shard_facts(pattern)
    paths = tuple(shards)
    labelled = any(member.name.endswith(".cls") for member in index_shard(paths[0]).members)

    def make(parts: Parts) -> Sample:
        if not labelled and "cls" in parts.members:
            raise SampleError(f"{parts.key} has a label, but those of the first shard have none.")
        if labelled and "cls" not in parts.members:
            raise SampleError(f"{parts.key} has no label (a member {parts.key}.cls).")
        label, image = parts.label(), parts.image()
        if image.size == 0:
            raise SampleError(f"{image.name} is empty (0 bytes).")
        return Sample(parts.key, image, label)

    found = listed(paths, read_shards(shards, make, bad, index=_whole))
    if found.labels is None:
        found = replace(found, labels=np.zeros(len(found), np.int64), classes=("",))
    places = zip(found.listing.file, found.listing.members, strict=True)
    return found.take(carve((f"{paths[file].name}/{member}" for file, member in places), split))


def _whole(path: Path) -> ShardIndex:
    """A shard's index; a cut shard is refused, whatever may be left out."""
    index = index_shard(path)
    if index.problem is not None:
        raise index.error()
    return index
