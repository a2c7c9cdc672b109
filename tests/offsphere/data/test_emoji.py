"""The emoji set: what is in it, how it is split, and its cache."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from offsphere.data import emoji as module
from offsphere.data.emoji import base_name, emoji_pictures, groups, load_emoji, on_white, subgroups
from offsphere.data.splits import PARTS, split_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "offsphere"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Only the first twelve emoji, so that drawing them takes no time."""
    some = load_emoji()[:12]
    monkeypatch.setattr(module, "load_emoji", lambda: some)
    return len(some)


def test_all_of_unicode_is_there_with_distinct_names() -> None:
    emoji = load_emoji()
    assert len(emoji) == 3944
    assert len({e.name for e in emoji}) == len({e.character for e in emoji}) == 3944
    assert len(groups()) == 9
    assert len(subgroups()) == 98
    first = emoji[0]
    assert (first.character, first.name) == ("\N{GRINNING FACE}", "grinning face")
    assert (first.group, first.subgroup) == ("Smileys & Emotion", "face-smiling")
    assert {"happy", "smile", "joy"} <= set(first.keywords)
    assert "grinning face" not in first.keywords


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("waving hand: light skin tone", "waving hand"),
        ("handshake: light skin tone, dark skin tone", "handshake"),
        ("kiss: person, person, light skin tone, dark skin tone", "kiss"),
        ("kiss: man, man, dark skin tone", "kiss: man, man"),
        ("man: medium skin tone, red hair", "man: red hair"),
        ("flag: Chad", "flag: Chad"),
        ("keycap: 1", "keycap: 1"),
        ("person: blond hair", "person: blond hair"),
    ],
)
def test_base_name_drops_skin_tones_only(name: str, base: str) -> None:
    assert base_name(name) == base


def test_every_base_is_an_emoji_without_skin_tone() -> None:
    plain = {e.name for e in load_emoji() if "skin tone" not in e.name}
    assert {e.base for e in load_emoji()} == plain
    assert len(plain) == 1914


def test_split_is_fixed_by_the_base_and_near_its_shares() -> None:
    sides: dict[str, set[str]] = {}
    for e in load_emoji():
        sides.setdefault(e.base, set()).add(split_of(e.base))
    assert all(len(side) == 1 for side in sides.values())
    counts = Counter(side.copy().pop() for side in sides.values())
    assert counts["train"] == pytest.approx(0.7 * 1914, rel=0.05)
    assert counts["test"] == pytest.approx(0.2 * 1914, rel=0.1)
    assert counts["validation"] == pytest.approx(0.1 * 1914, rel=0.15)
    for split in PARTS:
        assert {e.group for e in load_emoji() if split_of(e.base) == split} == set(groups())


@pytest.mark.parametrize("style", module.EMOJI_STYLES.values())
def test_pictures_are_the_drawings_on_white(style: str, cache: Path, few: int) -> None:
    pictures = emoji_pictures(24, style)
    assert pictures.shape == (few, 3, 24, 24)
    assert pictures.dtype == np.uint8
    assert (pictures[:, :, 0, 0] == 255).all()
    red, green, blue = pictures[0, :, 6, 12].astype(int)
    assert min(red, green) > blue + 60, "a grinning face is yellow"


def test_twemoji_at_native_size_is_the_png(cache: Path, few: int) -> None:
    path = module._picture_paths("twemoji")[3]
    expected = np.asarray(on_white(Image.open(path))).transpose(2, 0, 1)
    assert np.array_equal(emoji_pictures(72)[3], expected)


def test_every_emoji_has_both_drawings() -> None:
    for style in module.EMOJI_STYLES.values():
        paths = module._picture_paths(style)
        assert len(paths) == 3944
        assert all(path.exists() for path in paths[::50])


def test_cache_is_used_and_a_damaged_one_is_redrawn(
    cache: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = emoji_pictures(16)
    (stored,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_draw_all", lambda size, style: pytest.fail("not from the cache"))
        assert np.array_equal(emoji_pictures(16), drawn)
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 0xFF
    stored.write_bytes(content)
    assert np.array_equal(emoji_pictures(16), drawn)
    stored.write_bytes(bytes(content[:100]))
    assert np.array_equal(emoji_pictures(16), drawn)
    assert [path.name for path in cache.iterdir()] == [stored.name]


def test_works_without_a_writable_cache(
    tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert emoji_pictures(16).shape == (few, 3, 16, 16)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(np, "savez", _disk_full)
    assert emoji_pictures(16).shape == (few, 3, 16, 16)
    assert list((tmp_path / "offsphere").iterdir()) == []


def _disk_full(*args: object, **named: object) -> None:
    raise OSError(28, "No space left on device")


def test_transparent_becomes_white() -> None:
    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    picture.putpixel((1, 0), (0, 0, 0, 128))
    assert np.asarray(on_white(picture))[0].tolist() == [[255, 255, 255], [127, 127, 127]]
