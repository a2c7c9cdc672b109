"""Image data sets behind one call: emoji, torchvision's, image folders and tar shards.

`load_images("emoji", split="train", image_size=32)` gives pixels in memory, labels, class names and
a fingerprint. Sets too large for memory come back as `LazyImages`, decoded batch by batch.

Splits are train, validation, test, train+validation, and all. A set without a validation split
has one carved out of train (10 %, by a hash), so that tuning never touches test.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from offsphere.emoji import (
    cache_directory,
    emoji_pictures,
    groups,
    hash_share,
    load_emoji,
    on_white,
    split_of,
    subgroups,
)
from offsphere.names import unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jaxtyping import Int, UInt8
    from PIL.Image import Image
    from torch import Tensor

T = TypeVar("T")

SPLITS = ("train", "validation", "test", "train+validation", "all")
ON_BAD_SAMPLE = ("error", "skip")
VALIDATION_SHARE = 0.1
# Larger sets are not kept in memory.
MEMORY_LIMIT = 4 * 10**9
# From this many on, pictures are decoded by several processes, which hand over batches of so many
# pixels (small ones: containers often have little shared memory).
MANY_PICTURES = 4096
DECODE_PIXELS = 2**19
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
SHARD_SUFFIXES = ("jpg", "jpeg", "png", "webp")
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
DATA_NAMES = (*EMOJI_STYLES, *TORCHVISION_FILES, "folder:PATH", "wds:PATTERN")
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
    image_size: int
    fingerprint: str
    """Changes when a file's name or size, a label or a class name does."""
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.listing)

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """The class index of each picture."""
        return torch.from_numpy(self.listing.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names."""
        return self.listing.classes

    def batch(self, indices: Int[Tensor, " b"]) -> UInt8[Tensor, "b 3 h w"]:
        """Read and decode the pictures at these indices."""
        chosen = indices.tolist()
        out = torch.empty((len(chosen), 3, self.image_size, self.image_size), dtype=torch.uint8)
        for row, index in enumerate(chosen):
            out[row] = read_picture(self.listing, index, self.image_size)
        return out

    def __getitem__(self, index: int) -> tuple[UInt8[Tensor, "3 h w"], int]:
        return read_picture(self.listing, index, self.image_size), int(self.listing.labels[index])

    def __getitems__(
        self, indices: Sequence[int]
    ) -> tuple[UInt8[Tensor, "b 3 h w"], Int[Tensor, " b"]]:
        chosen = torch.as_tensor(indices)
        return self.batch(chosen), self.labels[chosen]


@dataclass(frozen=True, eq=False)
class Listing:
    """Where each encoded picture lies: a file of its own, or a stretch of a tar shard."""

    files: tuple[Path, ...]
    file: Int[np.ndarray, " n"]
    offsets: Int[np.ndarray, " n"]
    sizes: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    members: tuple[str, ...]
    """Name of each picture inside the folder or shard."""
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, keep: Int[np.ndarray, " k"]) -> Listing:
        """Some of the pictures."""
        return replace(
            self,
            file=self.file[keep],
            offsets=self.offsets[keep],
            sizes=self.sizes[keep],
            labels=self.labels[keep],
            members=tuple(self.members[i] for i in keep),
        )

    def where(self, index: int) -> str:
        """The picture's place, for messages."""
        path = self.files[self.file[index]]
        return f"{path}: {self.members[index]}" if path.suffix == ".tar" else str(path)


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


def load_images(
    data: str,
    *,
    split: str,
    image_size: int | None = None,
    download: bool = False,
    root: Path | None = None,
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
    kind, _, rest = data.partition(":")
    if kind in EMOJI_STYLES:
        images = _load_emoji(data, split, image_size or EMOJI_NATIVE_SIZE)
    elif data in TORCHVISION_FILES:
        images = _load_torchvision(data, split, download, root)
    elif kind in ("folder", "wds") and rest:
        lister = list_folder if kind == "folder" else list_shards
        listing = _limited_listing(lister(rest, split, bad), limit, seed)
        return _load_listing(data, listing, image_size, bad, memory_limit)
    else:
        raise unknown("data set", data, DATA_NAMES)
    pixels, labels, classes = images
    keep = torch.from_numpy(_limited(len(labels), limit, seed))
    pixels, labels = resize_square(pixels[keep], image_size), labels[keep]
    return _in_memory(data, pixels, labels, classes, ())


def _in_memory(
    name: str,
    pixels: UInt8[Tensor, "n 3 h w"],
    labels: Int[Tensor, " n"],
    classes: tuple[str, ...],
    skipped: tuple[str, ...],
) -> Images:
    _check_enough(name, len(labels), classes, skipped)
    digest = hashlib.sha256(repr((tuple(pixels.shape), classes)).encode())
    digest.update(np.ascontiguousarray(labels.numpy(), np.int64).data)
    digest.update(np.ascontiguousarray(pixels.numpy()).data)
    return Images(name, pixels, labels, classes, digest.hexdigest()[:16], skipped)


def _check_enough(name: str, count: int, classes: Sequence[str], skipped: Sequence[str]) -> None:
    if len(classes) < 2:
        raise ValueError(
            f"{name} has {len(classes)} class(es) ({', '.join(classes)}): a probe needs at least 2."
        )
    if count < 2:
        left_out = f" after leaving out {len(skipped)} bad ones" if skipped else ""
        raise ValueError(
            f"{name} has {count} image(s) in this split{left_out}: at least 2 are needed."
        )


def _limited(count: int, limit: int | None, seed: int) -> Int[np.ndarray, " k"]:
    """Indices of at most `limit` of `count` samples, in order."""
    if limit is None or limit >= count:
        return np.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return np.sort(order[:limit].numpy())


def _limited_listing(listing: Listing, limit: int | None, seed: int) -> Listing:
    return listing.take(_limited(len(listing), limit, seed))


def in_validation(key: str) -> bool:
    """Whether a training sample is carved out for validation."""
    return hash_share(key) < VALIDATION_SHARE


def _carve(keys: Iterable[str], split: str) -> Int[np.ndarray, " k"]:
    """Indices of the training samples that belong to `split`."""
    if split in ("train+validation", "all"):
        return np.arange(len(list(keys)))
    wanted = split == "validation"
    return np.flatnonzero([in_validation(key) == wanted for key in keys])


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
    wanted = (split,) if split != "all" else ("train", "validation", "test")
    wanted = ("train", "validation") if split == "train+validation" else wanted
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
        keep = torch.from_numpy(_carve(map(str, range(len(labels))), split))
        pixels, labels = pixels[keep], labels[keep]
    return pixels, labels, loaded[0][2]


def _default_root() -> Path:
    folder = cache_directory()
    return Path("data") if folder is None else folder / "data"


def _torchvision_part(name: str, train: bool, download: bool, root: Path) -> Arrays:
    from torchvision import datasets

    part = "train" if train else "test"
    if download:
        root.mkdir(parents=True, exist_ok=True)
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


def _label_tensor(labels: Sequence[int] | np.ndarray | Tensor | None) -> Int[Tensor, " n"]:
    return torch.as_tensor(np.asarray(labels), dtype=torch.int64)


def _digits() -> tuple[str, ...]:
    return tuple(str(digit) for digit in range(10))


def list_folder(folder: str, split: str, bad: BadSamples) -> Listing:
    """Pictures in class folders, below train/ val/ test/ if the folder has these."""
    path = existing(Path(folder))
    parts = {
        name: next((path / s for s in spellings if (path / s).is_dir()), None)
        for name, spellings in FOLDER_SPLITS.items()
    }
    if parts["train"] is None:
        classes, found = _class_folders([path])
        keep = {"train+validation": ("train", "validation"), "all": FOLDER_SPLITS}.get(
            split, (split,)
        )
        chosen = [(file, label) for file, label in found if split_of(_relative(file, path)) in keep]
        return _folder_listing(path, chosen, classes, bad)
    present = [part for part in parts.values() if part is not None]
    classes, found = _class_folders(present)
    sources, carve = _folder_sources(parts, split)
    chosen = [(file, label) for file, label in found if any(s in file.parents for s in sources)]
    if carve:
        keys = (_relative(file, path) for file, _ in chosen)
        chosen = [chosen[i] for i in _carve(keys, split)]
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


def _class_folders(parts: Sequence[Path]) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Class names over all parts, and each picture with its label, in sorted order."""
    names = sorted({d.name for part in parts for d in part.iterdir() if d.is_dir()})
    pictures = []
    for part in parts:
        for label, name in enumerate(names):
            files = sorted((part / name).rglob("*"))
            pictures += [(f, label) for f in files if f.suffix[1:].lower() in IMAGE_SUFFIXES]
    return tuple(names), pictures


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _folder_listing(
    folder: Path, found: list[tuple[Path, int]], classes: tuple[str, ...], bad: BadSamples
) -> Listing:
    kept, sizes = [], []
    for file, label in found:
        size = file.stat().st_size
        if size:
            kept.append((file, label))
            sizes.append(size)
        else:
            bad.add(f"{file} is empty (0 bytes).")
    return Listing(
        files=tuple(file for file, _ in kept),
        file=np.arange(len(kept)),
        offsets=np.zeros(len(kept), np.int64),
        sizes=np.array(sizes, np.int64),
        labels=np.array([label for _, label in kept], np.int64),
        members=tuple(_relative(file, folder) for file, _ in kept),
        classes=classes,
    )


def existing(path: Path) -> Path:
    """The path itself if it exists, else an error that names the nearest parent that does."""
    if path.exists():
        return path
    parent = next((p for p in path.absolute().parents if p.exists()), Path("/"))
    raise FileNotFoundError(
        f"No such file or folder: {path} (the nearest one that exists is {parent})."
    )


def shard_paths(pattern: str) -> tuple[Path, ...]:
    """The tar files of a pattern with braces, such as train-{000000..000004}.tar, or with *."""
    from braceexpand import braceexpand

    if pattern.startswith("pipe:"):
        raise ValueError(f"{pattern!r}: commands are not run to read data; give local tar files.")
    if "://" in pattern:
        raise ValueError(f"{pattern!r}: only local tar files are read; download the shards first.")
    paths: list[Path] = []
    for text in braceexpand(pattern):
        path = Path(text)
        if "*" in path.name:
            matches = sorted(existing(path.parent).glob(path.name))
            if not matches:
                raise FileNotFoundError(f"No file matches {path}.")
            paths += matches
        else:
            paths.append(existing(path))
    return tuple(paths)


def list_shards(pattern: str, split: str, bad: BadSamples) -> Listing:
    """Pictures in tar shards, each with a .cls member that holds its class index."""
    if split == "test":
        raise ValueError(
            f"The shards {pattern} have no test split of their own: name the test shards with "
            "--data-test=wds:PATTERN (they are read with split='all')."
        )
    paths = shard_paths(pattern)
    rows = [
        (number, *sample) for number, path in enumerate(paths) for sample in scan_shard(path, bad)
    ]
    members = tuple(row[1] for row in rows)
    numbers = np.array([(row[0], *row[2:]) for row in rows], np.int64).reshape(len(rows), 4)
    file, offsets, sizes, labels = (np.ascontiguousarray(column) for column in numbers.T)
    classes = _shard_classes(paths[0].parent / "classnames.txt", labels)
    listing = Listing(paths, file, offsets, sizes, labels, members, classes)
    keys = (f"{paths[f].name}/{member}" for f, member in zip(file, members, strict=True))
    return listing.take(_carve(list(keys), split))


def _shard_classes(names: Path, labels: Int[np.ndarray, " n"]) -> tuple[str, ...]:
    """Class names from a classnames.txt beside the shards, else the class indices."""
    count = int(labels.max()) + 1 if len(labels) else 0
    if not names.exists():
        return tuple(str(label) for label in range(count))
    classes = tuple(names.read_text(encoding="utf-8").split("\n"))
    classes = tuple(name.strip() for name in classes if name.strip())
    if len(classes) < count:
        raise ValueError(
            f"{names} names {len(classes)} classes, but the shards hold class index {count - 1}."
        )
    return classes


def scan_shard(path: Path, bad: BadSamples) -> Iterator[tuple[str, int, int, int]]:
    """Image member, offset, size and label of each complete sample of a shard, in order."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in _shard_members(path):
        folder, slash, name = member.name.rpartition("/")
        stem, _, suffix = name.partition(".")
        parts = samples.setdefault(folder + slash + stem, {})
        kind = suffix.rpartition(".")[2].lower()
        kind = "image" if kind in SHARD_SUFFIXES else kind
        if kind in parts:
            bad.add(f"{path}: two samples have the key {stem!r} ({member.name}).")
            continue
        parts[kind] = member
    with path.open("rb") as file:
        for key, parts in samples.items():
            image = parts.get("image")
            label = _read_label(path, file, key, parts.get("cls"), bad)
            if label is None:
                continue
            if image is None:
                bad.add(f"{path}: {key} has no image ({', '.join(SHARD_SUFFIXES)}).")
            elif image.size == 0:
                bad.add(f"{path}: {image.name} is empty (0 bytes).")
            else:
                yield image.name, image.offset_data, image.size, label


def _shard_members(path: Path) -> list[tarfile.TarInfo]:
    """The regular files of a tar that is whole, up to its end-of-archive mark."""
    try:
        with tarfile.open(path, "r:") as archive:
            members = archive.getmembers()
            archive.fileobj.seek(archive.offset)  # pyright: ignore[reportOptionalMemberAccess]
            mark = archive.fileobj.read(1024)  # pyright: ignore[reportOptionalMemberAccess]
    except tarfile.TarError as error:
        raise ValueError(
            f"The shard {path} is cut short or no uncompressed tar file ({error}): fetch it again."
        ) from error
    if mark != bytes(1024):
        raise ValueError(
            f"The shard {path} is cut short (it has no end-of-archive mark): fetch it again."
        )
    return [member for member in members if member.isfile()]


def _read_label(
    path: Path, file: io.BufferedReader, key: str, member: tarfile.TarInfo | None, bad: BadSamples
) -> int | None:
    if member is None:
        bad.add(f"{path}: {key} has no label (a member {key}.cls).")
        return None
    file.seek(member.offset_data)
    text = file.read(member.size).decode("utf-8", errors="replace").strip()
    if not text.isdecimal():
        bad.add(f"{path}: {member.name} should hold a class index such as 3, got {text[:40]!r}.")
        return None
    return int(text)


def _load_listing(
    name: str, listing: Listing, image_size: int | None, bad: BadSamples, memory_limit: int
) -> Images | LazyImages:
    """Decode everything into memory if it fits there."""
    _check_enough(name, len(listing), listing.classes, bad.messages)
    size = image_size or _native_size(listing)
    if len(listing) * 3 * size * size > memory_limit:
        if bad.skip:
            listing = listing.take(_readable(listing, size, bad))
        _check_enough(name, len(listing), listing.classes, bad.messages)
        return LazyImages(name, listing, size, _listing_hash(listing), tuple(bad.messages))
    pixels = torch.empty((len(listing), 3, size, size), dtype=torch.uint8)
    keep = _readable(listing, size, bad, pixels)
    if len(keep) < len(listing):
        pixels = pixels[torch.from_numpy(keep)]
    labels = torch.from_numpy(listing.labels[keep])
    return _in_memory(name, pixels, labels, listing.classes, tuple(bad.messages))


def _native_size(listing: Listing) -> int:
    """Short side of the first picture that can be read."""
    for index in range(len(listing)):
        try:
            return min(decode(_read_bytes(listing, index)).shape[1:])
        except _DECODING_ERRORS:
            continue
    return 1


def _readable(
    listing: Listing, size: int, bad: BadSamples, out: UInt8[Tensor, "n 3 s s"] | None = None
) -> Int[np.ndarray, " k"]:
    """Decode every picture, into `out` if given, and tell which could be decoded."""
    keep = np.ones(len(listing), bool)
    for indices, pictures, problems in _decoded(listing, size):
        for index, problem in problems:
            bad.add(problem)
            keep[index] = False
        if out is not None:
            out[indices] = pictures
    return np.flatnonzero(keep)


Decoded = tuple[list[int], "UInt8[Tensor, 'b 3 s s']", list[tuple[int, str]]]


@dataclass(frozen=True, eq=False)
class _Attempts(torch.utils.data.Dataset):
    """Decodes batches in worker processes; what cannot be decoded comes back as a message."""

    listing: Listing
    size: int

    def __len__(self) -> int:
        return len(self.listing)

    def __getitems__(self, indices: list[int]) -> Decoded:
        pictures = torch.zeros((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        problems = []
        for row, index in enumerate(indices):
            try:
                pictures[row] = read_picture(self.listing, index, self.size)
            except ValueError as error:
                problems.append((index, str(error)))
        return indices, pictures, problems


def _decoded(listing: Listing, size: int) -> Iterable[Decoded]:
    """All pictures in batches, by one process per core when there are many."""
    # A daemonic process, as a pool's worker is, may not start processes of its own.
    alone = len(listing) < MANY_PICTURES or multiprocessing.current_process().daemon
    return torch.utils.data.DataLoader(
        _Attempts(listing, size),
        batch_size=max(1, min(512, DECODE_PIXELS // size**2)),
        num_workers=0 if alone else min(_cores(), 8),
        collate_fn=as_it_is,
        # Its own generator: a DataLoader otherwise draws from the global stream.
        generator=torch.Generator(),
    )


def _cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def as_it_is(batch: T) -> T:
    """The batch itself: the collate function for data sets that give whole batches."""
    return batch


def _listing_hash(listing: Listing) -> str:
    digest = hashlib.sha256("\n".join((*listing.classes, "", *listing.members)).encode())
    digest.update(np.stack([listing.sizes, listing.labels]).tobytes())
    return digest.hexdigest()[:16]


def _read_bytes(listing: Listing, index: int) -> bytes:
    with listing.files[listing.file[index]].open("rb") as file:
        file.seek(listing.offsets[index])
        return file.read(listing.sizes[index])


_DECODING_ERRORS = (OSError, ValueError, RuntimeError, SyntaxError, EOFError)


def read_picture(listing: Listing, index: int, size: int) -> UInt8[Tensor, "3 size size"]:
    """Read, decode, resize and centre-crop one picture; an error names its place."""
    try:
        return resize_square(decode(_read_bytes(listing, index))[None], size)[0]
    except _DECODING_ERRORS as error:
        raise ValueError(f"{listing.where(index)} cannot be decoded: {error}.") from error


def decode(content: bytes) -> UInt8[Tensor, "3 h w"]:
    """The RGB pixels of an encoded picture; transparent parts become white."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        pixels = np.array(_to_rgb(picture))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _to_rgb(picture: Image) -> Image:
    if picture.mode == "RGB":
        return picture
    if picture.mode.startswith("I"):
        from PIL import Image

        picture = Image.fromarray((np.asarray(picture) // 256).astype(np.uint8))
    if "A" in picture.mode.upper() or "transparency" in picture.info:
        return on_white(picture)
    return picture.convert("RGB")


def resize_square(
    pixels: UInt8[Tensor, "n 3 h w"], size: int | None
) -> UInt8[Tensor, "n 3 size size"]:
    """Resize so that the short side is `size` (default: as it is), and crop the centre."""
    height, width = pixels.shape[2:]
    size = size or min(height, width)
    if height == width == size or not len(pixels):
        return pixels
    if min(height, width) != size:
        scale = size / min(height, width)
        shape = (max(size, round(height * scale)), max(size, round(width * scale)))
        pixels = torch.cat([_resize(chunk, shape) for chunk in pixels.split(4096)])
        height, width = shape
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[:, :, top : top + size, left : left + size].contiguous()


def _resize(
    pixels: UInt8[Tensor, "n 3 h w"], shape: tuple[int, int]
) -> UInt8[Tensor, "n 3 height width"]:
    return torch.nn.functional.interpolate(
        pixels, shape, mode="bilinear", antialias=True, align_corners=False
    )
