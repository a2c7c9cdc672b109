"""One chart engine: a Vega-Lite chart is defined once, for the page and for the paper.

A chart is Vega-Lite's own JSON, as a dictionary: the browser draws it live, vl-convert draws the
same as SVG, PNG and PDF. It names its colours as the page's style does, `var(--blue)`, so it
follows the page's theme without being drawn again; a paper figure has the light ones. Data are
columns with a name, which the charts of a part share. No torch.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from offsphere.page.looks import COLOURS, Look
from offsphere.page.numbers import DIGITS, short
from offsphere.run.files import write_whole

Chart = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]
Datasets = Mapping[str, Columns]
FONT = "Inter, system-ui, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
TEXT = {"labelColor": "var(--muted)", "titleColor": "var(--muted)", "labelFontSize": 11}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        **TEXT,
        "titleFontWeight": "normal",
        "titleFontSize": 11,
        "gridColor": "var(--grid)",
        "domainColor": "var(--edge)",
        "tickColor": "var(--edge)",
        "labelLimit": 170,
        "aria": False,
    },
    "axisX": {"tickCount": 5, "labelOverlap": True},
    "legend": {
        **TEXT,
        "orient": "bottom",
        "title": None,
        "labelLimit": 260,
        "columns": 4,
        "symbolOpacity": 1,
        "aria": False,
    },
    "header": {"labelColor": "var(--ink)", "labelFontWeight": "bold", "title": None},
    "title": {
        "color": "var(--ink)",
        "fontSize": 12,
        "anchor": "start",
        "subtitleColor": "var(--muted)",
    },
    "text": {"color": "var(--ink)"},
    "rule": {"color": "var(--muted)"},
    "point": {"filled": True, "size": 60, "opacity": 1},
    "concat": {"spacing": 24},
}
PAPER_CONFIG = CONFIG | {"background": "#ffffff", "axis": CONFIG["axis"] | {"labelLimit": 420}}
"""A paper is white in any reader, and has room for the names of rows; on a page, page.js gives them
a share of the window."""
PAINT = re.compile(r"var\(--([^)]+)\)")
PNG_FACTOR = 2.0
"""Pixels of a PNG for each pixel of a chart."""
PALETTE = 128
"""Colours of a PNG: a chart has a dozen, and the edges of its marks have blends of them."""


def columns(rows: Iterable[Mapping[str, Any]], digits: int = DIGITS) -> dict[str, list[Any]]:
    """Rows as columns, each number with the digits that a page carries."""
    found = list(rows)
    names = dict.fromkeys(name for row in found for name in row)
    return {name: [_plain(row.get(name), digits) for row in found] for name in names}


def scales(names: Sequence[str], looks: Sequence[Look]) -> tuple[Chart, Chart]:
    """The colours and the shapes of named levels."""
    colours = {"domain": list(names), "range": [look.paint for look in looks]}
    return colours, {"domain": list(names), "range": [look.shape for look in looks]}


def filled(part: Any, holes: Mapping[str, Any]) -> Any:
    """A chart, or a part of one, with its holes filled.

    `$name` alone stands for any value, and in a list for the members of one; inside a string it
    stands for letters.
    """
    if isinstance(part, str):
        name = part.removeprefix("$")
        return (
            holes[name]
            if f"${name}" == part and name in holes
            else Template(part).substitute(holes)
        )
    if isinstance(part, list):
        spread = (isinstance(each, str) and isinstance(holes.get(each[1:]), list) for each in part)
        found = zip(spread, (filled(each, holes) for each in part), strict=True)
        return [each for several, x in found for each in (x if several else [x])]
    if isinstance(part, dict):
        return {filled(key, holes): filled(value, holes) for key, value in part.items()}
    return part


def for_page(chart: Chart) -> Chart:
    """The chart as a page's store has it: as wide as its place, its data given by name."""
    fit = {"type": "fit-x", "contains": "padding"}
    return {**chart, "width": "container", "autosize": fit}


def drawn(chart: Chart, datasets: Datasets, config: Chart = CONFIG) -> str:
    """The chart as SVG that a page can carry as it is, in the page's colours."""
    import vl_convert  # pyright: ignore[reportMissingImports]

    spec = {**chart, "config": config, "datasets": _rows(datasets)}
    return vl_convert.vegalite_to_svg(json.dumps(spec))


def write_figure(chart: Chart, datasets: Datasets, stem: Path) -> list[Path]:
    """The chart as PDF, PNG and SVG, light; the same data give the same picture.

    SVG and PNG have the same bytes too; a PDF has its parts in any order.
    """
    import vl_convert  # pyright: ignore[reportMissingImports]

    svg = PAINT.sub(lambda found: COLOURS[found[1]][0], drawn(chart, datasets, PAPER_CONFIG))
    forms = {
        "svg": svg.encode(),
        "png": _in_few_colours(vl_convert.svg_to_png(svg, scale=PNG_FACTOR)),
        "pdf": vl_convert.svg_to_pdf(svg),
    }
    paths = [stem.with_name(f"{stem.name}.{form}") for form in forms]
    for path, content in zip(paths, forms.values(), strict=True):
        write_whole(path, content)
    return paths


def _in_few_colours(png: bytes) -> bytes:
    """The picture with a palette: lines and letters look the same in a seventh of the bytes."""
    from PIL import Image

    found = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    few.save(found, format="PNG", optimize=True)
    return found.getvalue()


def _rows(datasets: Datasets) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
        for name, found in datasets.items()
    }


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return short(value, digits)
    return [_plain(each, digits) for each in value] if isinstance(value, list | tuple) else value
