"""The images of a run: training, what is measured, and what is beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offsphere.data.handed import Handed, refuse_named, square_pixels
from vision.images import Images, load_images

if TYPE_CHECKING:
    from vision.settings import VisionSettings


@dataclass(frozen=True)
class Splits:
    """The images of a run: training, what is measured, and what calibrates a confidence."""

    train: Images
    test: Images
    validation: Images | None = None
    ood: Images | None = None

    def held_out(self, eval_split: str) -> Images | None:
        """The validation images, whether they are measured or not."""
        return self.test if eval_split == "validation" else self.validation

    def describe(self) -> dict[str, object]:
        """Name, size and content hash of each, and how many samples were left out as damaged."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: {"data": x.name, "size": len(x), "hash": x.fingerprint, "skipped": len(x.skipped)}
            for name, x in named.items()
            if x is not None
        }

    def told(self, measured: str) -> str:
        """The data in one line; `measured` is the name of the split that is measured."""
        train, test = self.train, self.test
        classes = f"{len(train.classes):,} classes" if is_labelled(train) else "without classes"
        skipped = sum(len(x.skipped) for x in (train, test))
        left_out = f", {skipped:,} damaged ones left out" if skipped else ""
        return (
            f"Data: {train.name}: {len(train):,} images to train on, {len(test):,} to measure on "
            f"({measured}), {classes}, {train.image_size} x {train.image_size} pixels{left_out}."
        )


kept_images = lru_cache(maxsize=4)(load_images)
"""`load_images`, once per process: the workers of a study share what they have decoded."""


def load_splits(settings: VisionSettings, handed: Handed | None = None) -> Splits:
    """Everything a run reads; the test split is left alone when validation is measured."""
    if handed is not None:
        return _handed_splits(settings, handed)
    refuse_named(settings.data)

    def load(data: str, split: str, limit: int | None = None) -> Images:
        return kept_images(
            data,
            split=split,
            image_size=settings.image_size,
            download=settings.download,
            root=None if settings.root is None else Path(settings.root),
            data_root=settings.data_root,
            on_bad_sample=settings.on_bad_sample,
            limit=limit,
        )

    train = load(settings.data, "train", settings.limit)
    validation = load(settings.data, "validation")
    if settings.eval_split == "validation":
        test, validation = validation, None
    elif settings.data_test is not None:
        test = load(settings.data_test, "all")
    else:
        test = load(settings.data, "test")
    check_same_classes(train, test)
    ood = None if settings.data_ood is None else load(settings.data_ood, "all")
    return Splits(train, test, validation, ood)


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


def _handed_splits(settings: VisionSettings, handed: Handed) -> Splits:
    """The images of a Dataset that was handed in, in memory."""
    test = handed.measured(settings.eval_split)
    wanted = {"train": handed.train, "test": test}
    if handed.validation is not None and settings.eval_split == "test":
        wanted["validation"] = handed.validation
    found = {
        name: images_of(dataset, handed, settings.image_size) for name, dataset in wanted.items()
    }
    classes = handed.classes or _numbers(x.labels for x in found.values())
    splits = Splits(**{name: replace(x, classes=classes) for name, x in found.items()})
    check_same_classes(splits.train, splits.test)
    return splits


def images_of(dataset: Any, handed: Handed, image_size: int) -> Images:
    """A Dataset of images or of (image, label)."""
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


def _numbers(labels: Iterable[Tensor]) -> tuple[str, ...]:
    """The classes of images whose labels are nothing but numbers."""
    return tuple(map(str, range(1 + max(int(x.max()) for x in labels))))


def is_labelled(images: Images) -> bool:
    """Whether there is anything to classify: two classes at least."""
    return len(images.labels.unique()) > 1
