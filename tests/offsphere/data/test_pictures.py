"""Pictures on disk: listings, splits by hash, and what loading says of bad ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from samples import encoded, random_picture

from offsphere.data import pictures
from offsphere.data.bad import BadSamples
from offsphere.data.pictures import (
    Listing,
    limited,
    list_files,
    load_pictures,
    native_size,
    normalised,
    read_picture,
    read_pictures,
    relative,
    square,
)
from offsphere.run import progress


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    """Six pictures: three files of their own, then three in one file called a tar."""
    contents = [encoded(random_picture(i)) for i in range(6)]
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(contents[i])
    (tmp_path / "rest.tar").write_bytes(b"head" + b"".join(contents[3:]))
    sizes = np.array([len(c) for c in contents])
    offsets = np.array([0, 0, 0, 4, 4 + sizes[3], 4 + sizes[3] + sizes[4]])
    files = (*(tmp_path / f"{i}.png" for i in range(3)), tmp_path / "rest.tar")
    names = tuple(f"{i}.png" for i in range(6))
    return Listing(files, np.array([0, 1, 2, 3, 3, 3]), offsets, sizes, names)


def test_pictures_are_read_by_offset_in_any_order(listing: Listing) -> None:
    order = torch.tensor([5, 0, 3, 3])
    assert torch.equal(
        read_pictures(listing, order, 8), torch.stack([random_picture(i) for i in order.tolist()])
    )
    some = listing.take(np.array([4, 1]))
    assert torch.equal(read_picture(some, 0, 8), random_picture(4))
    assert some.source(0) == f"{listing.files[3]}: 4.png"
    assert some.source(1) == str(listing.files[1])


def test_loading_in_memory_and_beyond(listing: Listing) -> None:
    pixels, keep = load_pictures(listing, 8, BadSamples("error"))
    assert pixels is not None
    assert torch.equal(pixels, torch.stack([random_picture(i) for i in range(6)]))
    assert keep.tolist() == list(range(6))
    assert load_pictures(listing, 8, BadSamples("error"), 6 * 3 * 64)[0] is not None
    assert load_pictures(listing, 8, BadSamples("error"), 6 * 3 * 64 - 1)[0] is None
    assert native_size(listing) == 8


@pytest.mark.parametrize("memory_limit", [10**9, 1])
def test_bad_pictures_are_left_out_and_named(listing: Listing, memory_limit: int) -> None:
    listing.files[1].write_bytes(encoded(random_picture(1))[:60])
    bad = BadSamples("skip")
    pixels, keep = load_pictures(listing, 8, bad, memory_limit)
    assert keep.tolist() == [0, 2, 3, 4, 5]
    assert len(bad.messages) == 1
    assert f"{listing.files[1]} cannot be decoded" in next(iter(bad.messages))
    if pixels is not None:
        assert torch.equal(pixels, torch.stack([random_picture(i) for i in (0, 2, 3, 4, 5)]))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"some")
    (tmp_path / "b.png").write_bytes(b"")
    files = [tmp_path / name for name in ("b.png", "a.png", "c.png")]
    bad = BadSamples("skip")
    found, kept = list_files(tmp_path, files, bad)
    assert kept == [1]
    assert found.members == ("a.png",)
    assert found.sizes.tolist() == [4]
    assert list(bad.messages) == [f"{files[0]} is empty (0 bytes).", f"{files[2]} is missing."]
    with pytest.raises(ValueError, match=r"b\.png is empty"):
        list_files(tmp_path, files, BadSamples("error"))


def test_a_digest_follows_names_and_sizes(listing: Listing) -> None:
    same = listing.take(np.arange(6))
    assert same.digest().hexdigest() == listing.digest().hexdigest()
    others = [
        listing.take(np.arange(5)),
        Listing(listing.files, listing.file, listing.offsets, listing.sizes + 1, listing.members),
        Listing(listing.files, listing.file, listing.offsets, listing.sizes, tuple("abcdef")),
    ]
    assert len({x.digest().hexdigest() for x in (listing, *others)}) == 4


def test_limited_is_a_sorted_subset_by_the_seed_0() -> None:
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert limited(10, 4).tolist() == sorted(order[:4].tolist())
    assert limited(10, None).tolist() == limited(10, 10).tolist() == list(range(10))


def test_square_resizes_the_short_side_and_crops() -> None:
    assert torch.equal(
        square(encoded(random_picture(0, 4, 10)), 4), random_picture(0, 4, 10)[:, :, 3:7]
    )


def test_pixels_are_normalised_as_torchvision_does() -> None:
    from torchvision.transforms.v2.functional import normalize

    pixels = torch.stack([random_picture(i) for i in range(2)])
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 1.0)
    expected = normalize(pixels / 255, mean, std)
    torch.testing.assert_close(normalised(pixels, mean, std), expected)


def test_relative_names(tmp_path: Path) -> None:
    assert relative(tmp_path / "a" / "b.png", tmp_path) == "a/b.png"
    assert relative(Path("/elsewhere/b.png"), tmp_path) == "/elsewhere/b.png"


def test_decoding_says_how_far_it_is(listing: Listing, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(pictures, "DECODE_PIXELS", 2 * 8 * 8)
    with progress.speaking():
        load_pictures(listing, 8, BadSamples("error"))
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [f"decoding pictures: {k} of 3 batches" for k in (1, 2, 3)]
