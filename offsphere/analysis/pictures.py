"""The figures that runs drew, as pictures small enough for the page. No torch.

A run leaves PNG files in its folder; `<study>/figures/<part>/<name>.webp` stands for them where the
run folders are not. Shown are those that have a caption, of the first finished run of a part in
which nothing is compared.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offsphere.analysis.captions import CAPTIONS
from offsphere.analysis.conditions import parts_of, plain_name, varying_settings
from offsphere.analysis.tables import runs_table
from offsphere.run.files import write_whole

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

PICTURES = "figures"
COLOURS = 64
"""Of a picture without losses: enough for lines and letters. A heat map is smaller with losses."""
QUALITY = 60


class Drawing(NamedTuple):
    """A figure's file, in a run's folder or in the study's."""

    part: str
    script: str
    name: str
    file: Path
    stored: bool


class Picture(NamedTuple):
    """A figure as the page carries it."""

    part: str
    script: str
    name: str
    content: bytes
    width: int
    height: int

    @property
    def address(self) -> str:
        return f"data:image/webp;base64,{base64.b64encode(self.content).decode()}"


def drawings(folder: str | Path, runs: pd.DataFrame) -> list[Drawing]:
    """The figures of a study's parts, from the run folder or else from the study's own files."""
    folder = Path(folder)
    found = []
    for (name, script), part in parts_of(runs) if len(runs) else []:
        finished = part.loc[part["status"] == "finished"]
        if finished.empty or varying_settings(part):
            continue
        run, own = folder / str(finished["run"].iloc[0]), plain_name(name or script)
        stored = not (run / "config.yaml").exists()
        files = (folder / PICTURES / own).glob("*.webp") if stored else run.glob("*.png")
        by_name = {file.stem: file for file in files}
        found += [
            Drawing(own, script, name, by_name[name], stored)
            for of, name in CAPTIONS
            if of == script and name in by_name
        ]
    return found


def picture_of(drawing: Drawing) -> Picture:
    """A figure as it was stored, or made small from what the run drew."""
    from PIL.Image import open as open_image

    content = drawing.file.read_bytes()
    try:
        with open_image(io.BytesIO(content)) as image:
            size = image.size
            if not drawing.stored:
                content = _smallest(image.convert("RGB"))
    except OSError as error:
        raise ValueError(f"{drawing.file} cannot be read as a picture: {error}") from None
    return Picture(drawing.part, drawing.script, drawing.name, content, *size)


def write_pictures(folder: str | Path) -> None:
    """Keep the figures of a study's runs beside its tables."""
    folder = Path(folder)
    fresh = [each for each in drawings(folder, runs_table(folder)) if not each.stored]
    written: dict[Path, set[Path]] = {}
    for drawing in fresh:
        picture = picture_of(drawing)
        home = folder / PICTURES / drawing.part
        home.mkdir(parents=True, exist_ok=True)
        file = home / f"{drawing.name}.webp"
        write_whole(file, picture.content)
        written.setdefault(home, set()).add(file)
    for home, files in written.items():
        for old in set(home.iterdir()) - files:
            old.unlink()


def figures_by_claim(folder: str | Path) -> dict[str, list[str]]:
    """The names, `part/figure`, of the figures in a study's folder that illustrate each claim."""
    found: dict[str, list[str]] = {}
    for drawing in drawings(folder, runs_table(folder)):
        for claim in CAPTIONS[drawing.script, drawing.name].claims:
            found.setdefault(claim, []).append(f"{drawing.part}/{drawing.name}")
    return found


def _smallest(image: Image) -> bytes:
    """The smaller WebP of two: few colours without losses, or all colours with losses."""
    from PIL.Image import Dither

    few, exact, lossy = image.quantize(COLOURS, dither=Dither.NONE), io.BytesIO(), io.BytesIO()
    # More effort takes fifty times as long and saves 2 %.
    few.convert("RGB").save(exact, format="WEBP", lossless=True, quality=60, method=4)
    image.save(lossy, format="WEBP", quality=QUALITY, method=6)
    return min(exact.getvalue(), lossy.getvalue(), key=len)
