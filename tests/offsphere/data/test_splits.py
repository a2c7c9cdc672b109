"""Parts of data sets by a hash: fixed for ever, a partition, of the shares that are said."""

from __future__ import annotations

import pytest

from offsphere.data.splits import carve, hash_share, in_validation, parts_of_split, split_of


def test_hash_never_changes() -> None:
    """Published splits depend on these numbers."""
    assert hash_share("grinning face") == pytest.approx(0.21958033970878077, abs=1e-12)
    assert split_of("grinning face") == "train"


def test_carving_is_a_partition_by_name_alone() -> None:
    keys = [f"key {i}" for i in range(2000)]
    train, validation = carve(keys, "train"), carve(iter(keys), "validation")
    assert sorted([*train, *validation]) == list(range(2000))
    assert all(in_validation(keys[i]) for i in validation)
    # Binomial with share 0.1: four standard deviations are 54.
    assert abs(len(validation) - 200) < 54
    assert carve(keys, "all") == carve(keys, "train+validation")
    assert len(carve(keys, "all")) == 2000


def test_parts_of_splits() -> None:
    assert parts_of_split("test") == ("test",)
    assert parts_of_split("train+validation") == ("train", "validation")
    assert parts_of_split("all") == ("train", "validation", "test")
