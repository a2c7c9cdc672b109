"""Which side of a split a key falls on, decided by a hash of it. Imports no torch."""

from __future__ import annotations

import hashlib

SPLITS = ("train", "validation", "test")
TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.1


def hash_share(key: str) -> float:
    """A number in [0, 1) that depends on nothing but the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def split_of(key: str) -> str:
    """The side a key falls on: 70 % train, 10 % validation, 20 % test."""
    share = hash_share(key)
    if share < TRAIN_SHARE:
        return "train"
    return "validation" if share < TRAIN_SHARE + VALIDATION_SHARE else "test"
