"""Which part of a data set a sample belongs to, decided by a hash of its name. Imports no torch.

A hash depends on nothing else, so a sample keeps its part when others come or go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

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
