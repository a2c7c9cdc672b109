"""Image data sets behind one call: emoji, torchvision's, image folders and tar shards.

`load_images("emoji", split="train", image_size=32)` gives pixels in memory, labels, class names and
a fingerprint. Sets too large for memory come back as `LazyImages`, decoded batch by batch.

Splits are train, validation, test, train+validation, and all. A set without a validation split
has one carved out of train (10 %, by a hash), so that tuning never touches test.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch

from offsphere.data.emoji import emoji_pictures, groups, load_emoji, subgroups
from offsphere.data.pictures import (
    MEMORY_LIMIT,
    SPLITS,
    Listing,
    carve,
    limited,
    list_files,
    load_pictures,
    native_size,
    parts_of_split,
    pictures_below,
    read_picture,
    read_pictures,
    relative,
    resize_square,
)
from offsphere.data.shards import (
    IMAGE_SUFFIXES,
    BadSamples,
    Member,
    ShardFacts,
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
from offsphere.data.splits import split_of
from offsphere.names import unknown
from offsphere.run.addresses import patience
from offsphere.run.catalog import KNOWN, resolve
from offsphere.run.files import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Int, UInt8
    from torch import Tensor

EMOJI_STYLES = {"emoji": "twemoji", "openmoji": "openmoji"}
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


@dataclass(frozen=True, eq=False)
class Images:
    """A data set whose pixels are in memory."""

    name: str
    pixels: UInt8[Tensor, "n 3 h w"] = field(repr=False)
    labels: Int[Tensor, " n"] = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    fingerprint: str
    """Changes when a pixel, a label or a class name does."""
    skipped: tuple[str, ...] = ()
    """What was wrong with each sample left out under on_bad_sample='skip'."""
    native: int | None = None
    """Short side of the first picture on disk, in pixels."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_size(self) -> int:
        """Side of the square pictures in pixels."""
        return self.pixels.shape[-1]

    def batch(self, indices: Int[Tensor, " b"]) -> UInt8[Tensor, "b 3 h w"]:
        """The pictures at these indices."""
        return self.pixels.index_select(0, indices)


@dataclass(frozen=True, eq=False)
class LazyImages(torch.utils.data.Dataset):
    """A data set whose pictures are read and decoded when they are asked for.

    As a `Dataset` it gives (pictures, labels) for a whole batch at once: hand a DataLoader
    `collate_fn=as_it_is`.
    """

    name: str
    listing: Listing = field(repr=False)
    labels: Int[Tensor, " n"] = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    image_size: int
    fingerprint: str
    """Changes when a file's name or size, a label or a class name does."""
    skipped: tuple[str, ...] = ()
    native: int | None = None

    def __len__(self) -> int:
        return len(self.listing)

    def batch(self, indices: Int[Tensor, " b"]) -> UInt8[Tensor, "b 3 h w"]:
        """Read and decode the pictures at these indices."""
        return read_pictures(self.listing, indices, self.image_size)

    def __getitem__(self, index: int) -> tuple[UInt8[Tensor, "3 h w"], int]:
        return read_picture(self.listing, index, self.image_size), int(self.labels[index])

    def __getitems__(
        self, indices: Sequence[int]
    ) -> tuple[UInt8[Tensor, "b 3 h w"], Int[Tensor, " b"]]:
        chosen = torch.as_tensor(indices)
        return self.batch(chosen), self.labels[chosen]


@dataclass(frozen=True, eq=False)
class Labelled:
    """Pictures on disk with their class indices."""

    listing: Listing
    labels: Int[np.ndarray, " n"]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.listing)

    def take(self, keep: Int[np.ndarray, " k"]) -> Labelled:
        """Some of the pictures."""
        return replace(self, listing=self.listing.take(keep), labels=self.labels[keep])


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
) -> Images | LazyImages:
    """One split of a data set, as square pictures of side `image_size` (default: its own size).

    `limit` keeps that many pictures, chosen by `seed`. Under on_bad_sample='skip', damaged
    pictures are found by decoding each one once, also in sets too large for memory.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if image_size is not None and image_size < 2:
        raise ValueError(f"image_size must be at least 2 pixels, got {image_size}.")
    if limit is not None and limit < 2:
        raise ValueError(f"limit must be at least 2 images, got {limit}.")
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
        return _load_listing(data, chosen, image_size, bad, memory_limit)
    else:
        raise unknown("data set", data, DATA_NAMES)
    pixels, labels, classes = images
    keep = torch.from_numpy(limited(len(labels), limit, seed))
    pixels, labels = resize_square(pixels[keep], image_size), labels[keep]
    return _in_memory(data, pixels, labels, classes, ())


def _in_memory(
    name: str,
    pixels: UInt8[Tensor, "n 3 h w"],
    labels: Int[Tensor, " n"],
    classes: tuple[str, ...],
    skipped: tuple[str, ...],
) -> Images:
    _check_enough(name, len(labels), skipped)
    digest = hashlib.sha256(repr((tuple(pixels.shape), classes)).encode())
    digest.update(np.ascontiguousarray(labels.numpy(), np.int64).data)
    digest.update(np.ascontiguousarray(pixels.numpy()).data)
    return Images(name, pixels, labels, classes, digest.hexdigest()[:16], skipped)


def _check_enough(name: str, count: int, skipped: Sequence[str]) -> None:
    if count < 2:
        left_out = f" after leaving out {len(skipped)} bad ones" if skipped else ""
        raise ValueError(
            f"{name} has {count} image(s) in this split{left_out}: at least 2 are needed."
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
    emoji = load_emoji()
    wanted = parts_of_split(split)
    keep = [i for i, e in enumerate(emoji) if e.split in wanted]
    pixels = torch.from_numpy(emoji_pictures(image_size, EMOJI_STYLES[style])[keep])
    labels = torch.tensor([index[getattr(emoji[i], label)] for i in keep])
    return pixels, labels, classes


def _load_torchvision(name: str, split: str, download: bool, root: Path | None) -> Arrays:
    """One of torchvision's labelled sets; its own training part is divided by a hash."""
    root = root or _default_root()
    parts = {"test": (False,), "all": (True, False)}.get(split, (True,))
    loaded = [_torchvision_part(name, train, download, root) for train in parts]
    pixels = torch.cat([part[0] for part in loaded])
    labels = torch.cat([part[1] for part in loaded])
    if split in ("train", "validation"):
        keep = torch.from_numpy(carve(map(str, range(len(labels))), split))
        pixels, labels = pixels[keep], labels[keep]
    return pixels, labels, loaded[0][2]


def _default_root() -> Path:
    folder = cache_directory()
    return Path("data") if folder is None else folder / "data"


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
            return torch.from_numpy(found.data), _label_tensor(found.labels), _digits()
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


def _digits() -> tuple[str, ...]:
    return tuple(str(digit) for digit in range(10))


def list_folder(folder: str, split: str, bad: BadSamples) -> Labelled:
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
        return _folder_listing(path, chosen, classes, bad)
    present = [part for part in parts.values() if part is not None]
    classes, found = _class_folders(present, bad)
    sources, carved = _folder_sources(parts, split)
    chosen = [(file, label) for file, label in found if any(s in file.parents for s in sources)]
    if carved:
        keys = (relative(file, path) for file, _ in chosen)
        chosen = [chosen[i] for i in carve(keys, split)]
    return _folder_listing(path, chosen, classes, bad)


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


def _folder_listing(
    folder: Path, found: list[tuple[Path, int]], classes: tuple[str, ...], bad: BadSamples
) -> Labelled:
    listing, kept = list_files(folder, (file for file, _ in found), bad)
    return Labelled(listing, np.array([found[i][1] for i in kept], np.int64), classes)


def list_shards(pattern: str, split: str, bad: BadSamples) -> Labelled:
    """Pictures in tar shards, each with a .cls member that holds its class index.

    If the first shard has no such member at all, the pictures have no classes.
    """
    if split == "test":
        raise ValueError(
            f"The shards {pattern} have no test split of their own: name the test shards with "
            "--data-test=wds:PATTERN (they are read with split='all')."
        )
    paths = shard_paths(pattern)
    manifests = {folder: read_manifest(folder) for folder in {path.parent for path in paths}}
    labelled = any(member.name.endswith(".cls") for member in index_shard(paths[0]).members)
    rows: list[tuple[int, ShardSample]] = []
    homes: dict[str, Path] = {}
    for number, path in enumerate(paths):
        facts = manifests[path.parent].get(path.name)
        for sample in scan_shard(path, bad, facts, labelled=labelled):
            home = homes.setdefault(sample.key, path)
            if home is path:
                rows.append((number, sample))
            else:
                bad.add(f"Two samples have the key {sample.key!r}: in {home} and in {path}.")
    members = tuple(sample.image.name for _, sample in rows)
    numbers = [(n, s.image.offset, s.image.size, s.label) for n, s in rows]
    columns = np.array(numbers, np.int64).reshape(len(rows), 4).T
    file, offsets, sizes, labels = (np.ascontiguousarray(column) for column in columns)
    classes = class_names(paths[0].parent, max(labels, default=-1)) if labelled else ("",)
    found = Labelled(Listing(paths, file, offsets, sizes, members), labels, classes)
    keys = (f"{paths[f].name}/{member}" for f, member in zip(file, members, strict=True))
    return found.take(carve(keys, split))


class ShardSample(NamedTuple):
    """One sample of a shard."""

    key: str
    image: Member
    label: int


def scan_shard(
    path: Path, bad: BadSamples, facts: ShardFacts | None = None, *, labelled: bool = True
) -> Iterator[ShardSample]:
    """The complete samples of a shard in order; `facts` are what its manifest says of it."""
    index = index_shard(path)
    if index.problem is not None:
        raise index.error()
    samples = list(samples_of(index, bad))
    problem = check_shard(index, facts, len(samples))
    if problem is not None:
        bad.add(problem, "reads what can be read of it")
    with path.open("rb") as file:
        for key, parts in samples:
            if not labelled and "cls" in parts:
                bad.add(f"{path}: {key} has a label, but those of the first shard have none.")
                continue
            image = parts.get("image")
            label = _read_label(path, file, key, parts, bad) if labelled else 0
            if label is None:
                continue
            if image is None:
                bad.add(f"{path}: {key} has no image ({', '.join(IMAGE_SUFFIXES)}).")
            elif image.size == 0:
                bad.add(f"{path}: {image.name} is empty (0 bytes).")
            else:
                yield ShardSample(key, image, label)


def _read_label(
    path: Path, file: BinaryIO, key: str, parts: dict[str, Member], bad: BadSamples
) -> int | None:
    if "cls" not in parts:
        bad.add(f"{path}: {key} has no label (a member {key}.cls).")
        return None
    try:
        return parse_label(read_member(file, parts["cls"]))
    except ValueError as error:
        bad.add(f"{path}: {parts['cls'].name} {error}")
        return None


def _load_listing(
    name: str, found: Labelled, image_size: int | None, bad: BadSamples, memory_limit: int
) -> Images | LazyImages:
    """Decode everything into memory if it fits there."""
    _check_enough(name, len(found), bad.messages)
    native = native_size(found.listing)
    size = image_size or native
    pixels, keep = load_pictures(found.listing, size, bad, memory_limit)
    kept = found.take(keep)
    labels, skipped = torch.from_numpy(kept.labels), tuple(bad.messages)
    if pixels is not None:
        images = _in_memory(name, pixels, labels, kept.classes, skipped)
        return replace(images, native=native)
    _check_enough(name, len(kept), skipped)
    digest = kept.listing.digest()
    digest.update("\n".join(kept.classes).encode() + kept.labels.tobytes())
    fingerprint = digest.hexdigest()[:16]
    return LazyImages(name, kept.listing, labels, kept.classes, size, fingerprint, skipped, native)
