"""A small image-text set that every test of this lane may train on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230)}
SHAPES = ("square", "stripe", "corner")


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV of 36 pictures of coloured shapes with two captions each."""
    folder = tmp_path_factory.mktemp("shapes")
    lines = ["image,caption"]
    draw = torch.Generator().manual_seed(0)
    for number in range(36):
        colour, shape = list(COLOURS)[number % 3], SHAPES[number // 3 % 3]
        picture = Image.new("RGB", (32, 32), (250, 250, 250))
        left, top = torch.randint(0, 12, (2,), generator=draw).tolist()
        box = {
            "square": (left, top, left + 16, top + 16),
            "stripe": (0, top, 32, top + 6),
            "corner": (0, 0, left + 6, top + 6),
        }[shape]
        picture.paste(COLOURS[colour], box)
        picture.save(folder / f"{number}.png")
        lines += [
            f"{number}.png,a {colour} {shape} {number}",
            f"{number}.png,{shape} in {colour} {number}",
        ]
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")
    return folder / "pairs.csv"
