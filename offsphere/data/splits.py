"""The splits of a run's data: drawn by a hash of each sample's name, or handed in from Python.
Imports no torch.

A hash depends on nothing else, so a sample keeps its part when others come or go.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

PARTS = ("train", "validation", "test")
SPLITS = (*PARTS, "train+validation", "all")
TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.1


def hash_share(key: str) -> float:
    """A number in [0, 1) that depends on nothing but the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def split_of(key: str) -> str:
    """The part of a sample of data without parts: 70 % train, 10 % validation, 20 % test."""
    share = hash_share(key)
    if share < TRAIN_SHARE:
        return "train"
    return "validation" if share < TRAIN_SHARE + VALIDATION_SHARE else "test"


def parts_of_split(split: str) -> tuple[str, ...]:
    """The parts that make up a split: train+validation has two, all has three."""
    return PARTS if split == "all" else tuple(split.split("+"))


def in_validation(key: str) -> bool:
    """Whether a training sample is carved out for validation."""
    return hash_share(key) < VALIDATION_SHARE


def carve(keys: Iterable[str], split: str) -> list[int]:
    """Indices of the training samples that belong to `split`."""
    wanted = {"train": (False,), "validation": (True,)}.get(split, (False, True))
    return [index for index, key in enumerate(keys) if in_validation(key) in wanted]


@dataclass(frozen=True)
class Splits:
    """What a run reads: data to train on, data that are measured, and what a lane puts beside."""

    train: Any
    test: Any

    def describe(self) -> dict[str, object]:
        """Name, size and content hash of each, and how many samples were left out as damaged."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: {
                "data": x.name,
                "size": len(x),
                "hash": x.fingerprint,
                "skipped": sum(x.skipped.values()),
            }
            for name, x in named.items()
            if x is not None
        }

    @property
    def left_out(self) -> str:
        """The end of a sentence about the data, if some samples are damaged."""
        # Two parts of the same shards have the same faults, which count once.
        skipped = sum({**self.train.skipped, **self.test.skipped}.values())
        return f", {skipped:,} damaged ones left out" if skipped else ""


@dataclass(frozen=True)
class Handed:
    """Splits of a data set that has no name a flag could give.

    What a split is depends on the lane: a `torch.utils.data.Dataset` of images or of (image,
    label), one of (image, caption or captions), or an iterable of (query, document) or of
    (sentence, sentence, score). Nothing of it is hashed: the caller says with the fingerprint when
    the content has changed, and a run does not resume with another one.
    """

    name: str
    """Stands for the data in the run's identity, as `--data` does for data with a name."""
    fingerprint: str
    train: Any
    test: Any = None
    validation: Any = None
    classes: tuple[str, ...] = ()
    """Names of an image set's labels; default: their numbers."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name):
            raise ValueError(
                f"Handed data need a name of letters, digits, . _ + and -, got {self.name!r}."
            )
        if not self.fingerprint:
            raise ValueError(
                f"The handed data {self.name} need a fingerprint, such as a version or a hash."
            )

    def measured(self, eval_split: str) -> Any:
        """The split that a run measures."""
        found = self.validation if eval_split == "validation" else self.test
        if found is None:
            raise ValueError(
                f"The handed data {self.name} have no {eval_split} split, which is measured: hand "
                f"in Handed({eval_split}=...), or set eval_split."
            )
        return found
