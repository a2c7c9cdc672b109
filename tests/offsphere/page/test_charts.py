"""A chart is one definition for the page, in its colours, and for the paper, in light ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from offsphere.page import charts
from offsphere.page.looks import CELL_LOOKS, COLOURS, LEVEL_LOOKS, look_of

DATA = {"cells": charts.columns([{"cell": "dot", "x": 1 / 3}, {"cell": "cosine", "x": 2.0}])}


def points() -> charts.Chart:
    names = ["cosine", "dot"]
    colours, shapes = charts.scales(names, [CELL_LOOKS[name] for name in names])
    return {
        "data": {"name": "cells"},
        "width": 200,
        "mark": "point",
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "cell", "type": "nominal"},
            "color": {"field": "cell", "type": "nominal", "scale": colours},
            "shape": {"field": "cell", "type": "nominal", "scale": shapes},
        },
    }


def test_columns_have_the_digits_that_a_page_carries() -> None:
    assert DATA["cells"] == {"cell": ["dot", "cosine"], "x": [0.3333, 2]}
    rows = [{"x": float("nan"), "seeds": [0.1234567, float("inf")]}, {"y": 1}]
    expected = {"x": [None, None], "seeds": [[0.1235, None], None], "y": [None, 1]}
    assert charts.columns(rows) == expected


def test_holes_of_a_chart_take_values_members_of_lists_and_letters() -> None:
    chart = {"layer": ["$zero", {"mark": "$mark"}, "$more"], "x": {"$side": {"field": "${p}mean"}}}
    holes = {"zero": [], "mark": {"type": "point"}, "more": [1, 2], "side": "y", "p": "d"}
    assert charts.filled(chart, holes) == {
        "layer": [{"mark": {"type": "point"}}, 1, 2],
        "x": {"y": {"field": "dmean"}},
    }
    with pytest.raises(KeyError, match="mark"):
        charts.filled({"mark": "$mark"}, {})


def test_a_chart_on_a_page_is_as_wide_as_its_place_and_has_its_data_by_name() -> None:
    spec = charts.for_page(points())
    assert (spec["width"], spec["data"]) == ("container", {"name": "cells"})
    assert spec["encoding"]["color"]["scale"]["range"] == ["var(--cosine)", "var(--dot)"]
    assert "datasets" not in spec


def test_a_paper_figure_is_light_and_the_same_every_time(tmp_path: Path) -> None:
    first = charts.write_figure(points(), DATA, tmp_path / "first")
    again = charts.write_figure(points(), DATA, tmp_path / "again")
    assert [path.suffix for path in first] == [".svg", ".png", ".pdf"]
    assert [path.read_bytes() for path in first[:2]] == [path.read_bytes() for path in again[:2]]
    # The same parts in any order.
    assert len(first[2].read_bytes()) == len(again[2].read_bytes())
    svg = first[0].read_text()
    assert "var(" not in svg
    assert COLOURS["cosine"][0] in svg
    assert COLOURS["dot"][0] in svg
    assert first[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert first[2].read_bytes()[:5] == b"%PDF-"


def test_a_cell_looks_the_same_everywhere_and_a_level_by_its_place() -> None:
    assert look_of("dot", 0) == look_of("dot", 3) == CELL_LOOKS["dot"]
    assert look_of(None, 9) == LEVEL_LOOKS[1]
    assert look_of("new", 2) == LEVEL_LOOKS[2]
    assert len(set(CELL_LOOKS.values())) == len(CELL_LOOKS)


def test_every_colour_can_be_read_as_text_on_its_paper() -> None:
    for name in ("ink", "muted", "accent", "good", "bad"):
        for theme in (0, 1):
            assert contrast(COLOURS[name][theme], COLOURS["paper"][theme]) >= 4.5


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
