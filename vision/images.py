"""Image data sets behind one call: emoji, torchvision's, image folders and tar shards.

`load_images("emoji", split="train", image_size=32)` gives pixels in memory, labels, class names and
a fingerprint. Sets too large for memory are decoded batch by batch.

Splits are train, validation, test, train+validation, and all. A set without a validation split
has one carved out of train (10 %, by a hash), so that tuning never touches test.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from offsphere.data.bad import BadSamples
from offsphere.data.emoji import (
    EMOJI_STYLES,
    emoji_of_split,
    emoji_pictures,
    groups,
    load_emoji,
    subgroups,
)
from offsphere.data.pictures import (
    MEMORY_LIMIT,
    Listing,
    Pictures,
    check_enough,
    check_request,
    limited,
    list_files,
    native_size,
    pictures_below,
    relative,
    resize_square,
)
from offsphere.data.samples import (
    Parts,
    Sample,
    SampleError,
    Samples,
    listed,
    read_shards,
    shard_facts,
)
from offsphere.data.shards import ShardIndex, existing, index_shard
from offsphere.data.splits import carve, parts_of_split, split_of
from offsphere.names import unknown
from offsphere.run.addresses import patience
from offsphere.run.catalog import KNOWN, resolve
from offsphere.run.files import cache_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int, UInt8
    from torch import Tensor

EMOJI_LABELS = ("group", "subgroup")
EMOJI_NATIVE_SIZE = 72
# What torchvision looks for under the root directory.
TORCHVISION_FILES = {
    "cifar10": "cifar-10-batches-py/ (unpacked from cifar-10-python.tar.gz)",
    "cifar100": "cifar-100-python/ (unpacked from cifar-100-python.tar.gz)",
    "stl10": "stl10_binary/ (unpacked from stl10_binary.tar.gz)",
    "svhn": "train_32x32.mat and test_32x32.mat",
    "mnist": "MNIST/raw/ with the four idx-ubyte files",
    "fashion-mnist": "FashionMNIST/raw/ with the four idx-ubyte files",
}
NAMED = tuple(name for name in KNOWN if name.startswith(("cifar10", "tinyimagenet32")))
DATA_NAMES = (*EMOJI_STYLES, *TORCHVISION_FILES, *NAMED, "folder:PATH", "wds:PATTERN")
FOLDER_SPLITS = {
    "train": ("train",),
    "validation": ("val", "valid", "validation"),
    "test": ("test",),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Images(Pictures):
    """Pictures with one class index each."""

    labels: Int[Tensor, " n"] = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    native: int | None = None
    """Short side of the first picture on disk, in pixels."""


def load_images(
    data: str,
    *,
    split: str,
    image_size: int | None = None,
    download: bool = False,
    root: Path | None = None,
    data_root: str | None = None,
    on_bad_sample: str = "error",
    limit: int | None = None,
    seed: int = 0,
    memory_limit: int = MEMORY_LIMIT,
) -> Images:
    """One split of a data set, as square pictures of side `image_size` (default: its own size).

    `limit` keeps that many pictures, chosen by `seed`. Under on_bad_sample='skip', damaged
    pictures are found by decoding each one once, also in sets too large for memory.
    """
    check_request(split, image_size, limit)
    bad = BadSamples(on_bad_sample)
    kind, _, rest = resolve(data, data_root).partition(":")
    if kind in EMOJI_STYLES:
        images = _load_emoji(data, split, image_size or EMOJI_NATIVE_SIZE)
    elif data in TORCHVISION_FILES:
        images = _load_torchvision(data, split, download, root)
    elif kind in ("folder", "wds") and rest:
        lister = list_folder if kind == "folder" else list_shards
        found = lister(rest, split, bad)
        chosen = found.take(limited(len(found), limit, seed))
        return _load_samples(data, chosen, image_size, bad, memory_limit)
    else:
        raise unknown("data set", data, DATA_NAMES)
    pixels, labels, classes = images
    keep = torch.from_numpy(limited(len(labels), limit, seed))
    pixels = resize_square(pixels[keep], image_size)
    return _images(data, pixels, pixels.shape[-1], labels[keep], classes)


def _images(
    name: str,
    pictures: UInt8[Tensor, "n 3 s s"] | Listing,
    size: int,
    labels: Int[Tensor, " n"],
    classes: tuple[str, ...],
    skipped: Sequence[str] = (),
    native: int | None = None,
) -> Images:
    """The data set with its fingerprint."""
    check_enough(name, len(labels), skipped)
    numbers = np.ascontiguousarray(labels.numpy(), np.int64)
    if isinstance(pictures, Listing):
        digest = pictures.digest()
        digest.update("\n".join(classes).encode() + numbers.tobytes())
    else:
        digest = hashlib.sha256(repr((tuple(pictures.shape), classes)).encode())
        digest.update(numbers.data)
        digest.update(np.ascontiguousarray(pictures.numpy()).data)
    return Images(
        name=name,
        pictures=pictures,
        image_size=size,
        fingerprint=digest.hexdigest()[:16],
        skipped=tuple(skipped),
        labels=labels,
        classes=classes,
        native=native,
    )


Arrays = tuple["UInt8[Tensor, 'n 3 h w']", "Int[Tensor, ' n']", tuple[str, ...]]


def _load_emoji(data: str, split: str, image_size: int) -> Arrays:
    """Emoji drawings labelled by group, or by subgroup for `emoji:subgroup`."""
    style, _, label = data.partition(":")
    label = label or "group"
    if label not in EMOJI_LABELS:
        raise unknown("emoji label", label, EMOJI_LABELS)
    classes = groups() if label == "group" else subgroups()
    index = {name: i for i, name in enumerate(classes)}
    emoji, keep = load_emoji(), emoji_of_split(split)
    pixels = torch.from_numpy(emoji_pictures(image_size, EMOJI_STYLES[style])[keep])
    labels = torch.tensor([index[getattr(emoji[i], label)] for i in keep])
    return pixels, labels, classes


def _load_torchvision(name: str, split: str, download: bool, root: Path | None) -> Arrays:
    """One of torchvision's labelled sets; its own training part is divided by a hash."""
    root = root or (cache_directory() or Path()) / "data"
    parts = {"test": (False,), "all": (True, False)}.get(split, (True,))
    loaded = [_torchvision_part(name, train, download, root) for train in parts]
    pixels = torch.cat([part[0] for part in loaded])
    labels = torch.cat([part[1] for part in loaded])
    if split in ("train", "validation"):
        keep = carve(map(str, range(len(labels))), split)
        pixels, labels = pixels[keep], labels[keep]
    return pixels, labels, loaded[0][2]


def _torchvision_part(name: str, train: bool, download: bool, root: Path) -> Arrays:
    from torchvision import datasets

    part = "train" if train else "test"
    before = socket.getdefaulttimeout()
    if download:
        root.mkdir(parents=True, exist_ok=True)
        socket.setdefaulttimeout(patience())  # torchvision would wait for a silent server forever
    try:
        if name == "svhn":
            found = datasets.SVHN(root, split=part, download=download)
            return torch.from_numpy(found.data), _label_tensor(found.labels), tuple("0123456789")
        if name == "stl10":
            found = datasets.STL10(root, split=part, download=download)
            return torch.from_numpy(found.data), _label_tensor(found.labels), tuple(found.classes)
        if name in ("mnist", "fashion-mnist"):
            make = datasets.MNIST if name == "mnist" else datasets.FashionMNIST
            found = make(root, train=train, download=download)
            grey = found.data[:, None].expand(-1, 3, -1, -1).contiguous()
            return grey, _label_tensor(found.targets), tuple(found.classes)
        make = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        found = make(root, train=train, download=download)
        pixels = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
        return pixels, _label_tensor(found.targets), tuple(found.classes)
    except (RuntimeError, OSError) as error:
        tried = f"could not be downloaded ({error})" if download else "is not there"
        advice = "" if download else ", or pass --download to fetch it"
        raise FileNotFoundError(
            f"The data set {name} {tried}: put {TORCHVISION_FILES[name]} into {root}{advice}; "
            "the default --data=emoji needs no files."
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _label_tensor(labels: Sequence[int] | np.ndarray | Tensor | None) -> Int[Tensor, " n"]:
    return torch.as_tensor(np.asarray(labels), dtype=torch.int64)


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
    names = sorted({d.name for part in parts for d in part.iterdir() if d.is_dir()}) or [""]
    pictures = []
    for part in parts:
        for label, name in enumerate(names):
            if (part / name).exists():
                pictures += [(file, label) for file in pictures_below(part / name, bad)]
        for file in pictures_below(part, bad, deep=False) if names != [""] else ():
            bad.add(f"{file} lies outside the class folders ({', '.join(names[:3])}, ...).")
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


def _load_samples(
    name: str, found: Samples, image_size: int | None, bad: BadSamples, memory_limit: int
) -> Images:
    """Decode everything into memory if it fits there."""
    check_enough(name, len(found), bad.messages)
    native = native_size(found.listing)
    size = image_size or native
    pictures, kept = found.load(size, bad, memory_limit)
    labels = torch.from_numpy(kept.labels)
    return _images(name, pictures, size, labels, kept.classes, bad.messages, native)
