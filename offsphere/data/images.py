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
from typing import TYPE_CHECKING, Any

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
    native_size,
    resize_square,
    square_pixels,
)
from offsphere.data.samples import Samples, list_folder, list_shards
from offsphere.data.splits import Handed, Splits, carve
from offsphere.names import unknown, unknown_data
from offsphere.run.addresses import patience
from offsphere.run.catalog import KNOWN, resolve
from offsphere.run.files import cache_directory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    memory_limit: int = MEMORY_LIMIT,
) -> Images:
    """One split of a data set, as square pictures of side `image_size` (default: its own size).

    `limit` keeps that many pictures (see `limited`). Under on_bad_sample='skip', damaged pictures
    are found by decoding each one once, also in sets too large for memory.
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
        chosen = found.take(limited(len(found), limit))
        return _load_samples(data, chosen, image_size, bad, memory_limit)
    else:
        raise unknown_data("data set", data, DATA_NAMES)
    pixels, labels, classes = images
    keep = torch.from_numpy(limited(len(labels), limit))
    pixels = resize_square(pixels[keep], image_size)
    return _images(data, pixels, pixels.shape[-1], labels[keep], classes)


def _images(
    name: str,
    pictures: UInt8[Tensor, "n 3 s s"] | Listing,
    size: int,
    labels: Int[Tensor, " n"],
    classes: tuple[str, ...],
    skipped: Mapping[str, int] | None = None,
    native: int | None = None,
) -> Images:
    """The data set with its fingerprint."""
    skipped = skipped or {}
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
        skipped=skipped,
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


@dataclass(frozen=True)
class ImageSplits(Splits):
    """The images of a run: training, what is measured, and what calibrates a confidence."""

    train: Images
    test: Images
    validation: Images | None = None
    ood: Images | None = None

    def in_words(self, measured: str) -> str:
        """The data in one line; `measured` is the name of the split that is measured."""
        train, test = self.train, self.test
        present, every = len(train.labels.unique()), len(train.classes)
        classes = f"{every:,} classes" if present == every else f"{present:,} of {every:,} classes"
        classes = classes if is_labelled(train) else "without classes"
        return (
            f"Data: {train.name}: {len(train):,} images to train on, {len(test):,} to measure on "
            f"({measured}), {classes}, {train.image_size} x {train.image_size} "
            f"pixels{self.left_out}."
        )


def check_same_classes(train: Images, test: Images) -> None:
    """Refuse test data whose labels stand for other classes than those of the training data."""
    if len(test.classes) != len(train.classes):
        raise ValueError(
            f"{train.name} has {len(train.classes)} classes and {test.name} {len(test.classes)}: "
            "training and test data must share their classes."
        )
    if not (has_names(train.classes) and has_names(test.classes)):
        return
    for label, (ours, theirs) in enumerate(zip(train.classes, test.classes, strict=True)):
        if plain_name(ours) != plain_name(theirs):
            raise ValueError(
                f"Class {label} is {ours!r} in {train.name} and {theirs!r} in {test.name}: "
                "training and test data must share their classes, in one order. Give --data-test "
                "with the classes of --data."
            )


def has_names(classes: Sequence[str]) -> bool:
    """Whether classes have names of their own, not just their numbers as in shards without any."""
    return any(name != str(label) for label, name in enumerate(classes))


def plain_name(name: str) -> str:
    """A class name without what data sets spell differently: Aquarium_Fish, aquarium fish."""
    return name.casefold().replace("_", " ")


def handed_splits(handed: Handed, eval_split: str, image_size: int) -> ImageSplits:
    """The images that were handed in from Python, in memory."""
    wanted = {"train": handed.train, "test": handed.measured(eval_split)}
    if handed.validation is not None and eval_split == "test":
        wanted["validation"] = handed.validation
    found = {name: _handed_images(each, handed, image_size) for name, each in wanted.items()}
    highest = max(int(x.labels.max()) for x in found.values())
    classes = handed.classes or tuple(str(label) for label in range(1 + highest))
    splits = ImageSplits(**{name: replace(x, classes=classes) for name, x in found.items()})
    check_same_classes(splits.train, splits.test)
    return splits


def _handed_images(dataset: Any, handed: Handed, image_size: int) -> Images:
    """A Dataset of images or of (image, label); its classes are not known yet."""
    items = [dataset[row] for row in range(len(dataset))]
    pairs = [item if isinstance(item, tuple | list) else (item, 0) for item in items]
    pixels = square_pixels((image for image, _ in pairs), image_size, handed.name)
    labels = torch.tensor([int(label) for _, label in pairs])
    return Images(
        name=f"handed:{handed.name}",
        pictures=pixels,
        image_size=image_size,
        fingerprint=handed.fingerprint,
        labels=labels,
        classes=(),
    )


def is_labelled(images: Images) -> bool:
    """Whether there is anything to classify: two classes at least."""
    return len(images.labels.unique()) > 1
