"""The pictures of the answer show the numbers they are given."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from offsphere.analysis.claim_file import Claim
from offsphere.analysis.claims import Verdict
from offsphere.analysis.digest import Comparison
from offsphere.analysis.overview import (
    FARTHEST,
    Plate,
    claim_plates,
    forest,
    paper_chart,
    paper_plate,
    squares,
    symmetry,
)
from offsphere.analysis.stats import estimate
from offsphere.estimate import Estimate
from offsphere.page.charts import PAPER_CONFIG, drawn


def comparison(cell: str, where: str, mean: float, *, n: int = 5, **others: Any) -> Comparison:
    low, high = (mean - 0.1, mean + 0.1) if n else (math.nan, math.nan)
    kind = "symmetric" if where.startswith("cells_simclr") else "asymmetric"
    task = "Two views of an image" if kind == "symmetric" else "Query and document"
    ratio = Estimate(mean, low, high, n)
    runs = frozenset(f"{task}-{cell}-seed{seed}" for seed in range(n))
    return Comparison(
        **{"kind": kind, "task": task, "about": where, "setting": "", "source": "ours"}
        | {"metric": "test/x", "cell": cell, "ratio": ratio, "runs": runs}
        | others
    )


OURS = [
    *(comparison(c, "cells_simclr · cells", m) for c, m in (("dot", -0.2), ("qnorm", -0.1))),
    comparison("dot", "cells_simclr · primary", -0.3, n=10),
    comparison("dot", "cells_retrieval · pretrained", 0.4),
]
SIDES = ("discarded", "kept")
SVG = "{http://www.w3.org/2000/svg}"
PUBLISHED = {"n": 0, "setting": "contriever", "source": "2602.09229v1, table 1"}
PAPER = comparison("dot", "contriever, fine-tuned", 0.06, **PUBLISHED)


def test_dot_over_cosine_by_symmetry_with_the_most_seeds_of_each_task():
    others = [
        # Other names of runs with the same numbers: they measured something else besides.
        comparison("dot", "symmetry · text", 0.4, runs=frozenset("abcde")),
        comparison("dot", "scale · given", 0.1, setting="fixed", runs=frozenset("fghij")),
        comparison("dot", "cells_simclr · tuned", -0.4, runs=frozenset("k"), n=1, at_floor=True),
    ]
    found = symmetry([*OURS, PAPER, *others])
    assert found is not None
    data = found.data["symmetry"]
    rows = list(zip(*(data[key] for key in ("cell", "label", "mean", "source")), strict=True))
    assert [row[1:] for row in rows if row[0] == "dot"] == [
        ("different roles", None, ""),
        ("Query and document (5 seeds)", 0.4, "ours"),
        ("Query and document (contriever, table 1)", 0.06, "published"),
        ("Query and document (fixed, 5 seeds)", 0.1, "ours"),
        ("interchangeable", None, ""),
        ("Two views of an image (cells_simclr · primary, 10 seeds)", -0.3, "ours"),
        ("Two views of an image (cells_simclr · tuned, 1 seed, at the floor)", -0.4, "ours"),
    ]
    # The paper shows dot; the page any cell.
    assert found.controls == {"cell": ["dot", "qnorm"]}
    svg = drawn(paper_chart(found), found.data, PAPER_CONFIG)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert [x for x in texts if "seed" in x or "table" in x] == [
        label for cell, label, mean, _ in rows if cell == "dot" and mean is not None
    ]


def test_a_square_needs_all_corners_and_ours():
    assert symmetry([PAPER]) is None
    assert squares([*OURS, PAPER]) is None
    found = squares([*OURS, comparison("dnorm", "cells_simclr · cells", 0.05)])
    assert found is not None
    data = found.data["squares"]
    assert data["cell"] == ["cosine", "qnorm", "dnorm", "dot"]
    assert data["mean"] == [0, -0.1, 0.05, -0.2]
    sides = list(zip(data["left"], data["right"], strict=True))
    assert sides == [(left, right) for left in SIDES for right in SIDES]
    svg = drawn(paper_chart(found), found.data, PAPER_CONFIG)
    assert all(x in svg for x in ("−0.200", "[−0.300, −0.100]"))


def verdict(name: str, values: list[float], margin: float) -> Verdict:
    claim = Claim(name, "primary", "It is so.", "ours", None, margin=margin)
    return Verdict(claim, "shown", "", estimate(values))


PLATES = """
- id: roles
  title: Does it matter?
  panels:
  - title: Where
    axis: right of 0 it helps
    rows:
    - heading: different roles
    - one: text
    - two: images
    - elsewhere: a claim of another study
  - title: Nothing yet
    axis: right of 0 it helps
    rows: [{three: films}]
- {id: empty, title: Later, panels: [{title: x, axis: x, rows: [{three: films}]}]}
"""


def test_a_picture_of_claims_has_their_figures_and_says_what_is_missing(tmp_path):
    file = tmp_path / "pictures.yaml"
    file.write_text(PLATES)
    figures = [0.1, 0.2, 0.6]
    of = {"kind": "descriptive", "text": "So.", "source": "ours", "published": "printed"}
    measured = Claim("one", metric="test/x", transform="log", published_size=-0.6, **of)
    shut = Claim("two", metric="test/x", transform="log", **of)
    waits = Claim("three", metric="test/probe", **of)
    board = [
        Verdict(measured, "measured", "", estimate(figures), steps=(1000, 3125)),
        Verdict(shut, "not testable here", "floor"),
        Verdict(waits, "not run", "offsphere study x.yaml"),
    ]
    plates = claim_plates(file, board)
    assert list(plates) == ["roles"]
    (chart,) = plates["roles"].charts
    data = chart.data["roles_0"]
    rows = list(zip(*(data[key] for key in ("row", "source", "mean", "n", "note")), strict=True))
    assert rows == [
        (1, "ours", pytest.approx(0.3), 3, ""),
        (1, "published", -0.6, 0, ""),
        (2, "ours", None, 0, "not testable here"),
    ]
    assert data["low"][0] == pytest.approx(estimate(figures).low, rel=1e-3)
    svg = drawn(*paper_plate(plates["roles"]), PAPER_CONFIG)
    assert all(x in svg for x in ("3 seeds, 1,000 to 3,125 steps", "images", "Does it matter?"))
    assert "another study" not in svg
    # The middle of each name, of one line or of two, lies at its row.
    texts = [(x, x.get("transform", "")) for x in ET.fromstring(svg).iter(f"{SVG}text")]
    names = [(x, place) for x, place in texts if place.startswith("translate(-")]
    lines = [max(1, len(name)) for name, _ in names]
    tops = [float(re.findall(r"[\d.]+", place)[-1]) for _, place in names]
    middles = [top + 6.5 * (n - 1) for top, n in zip(tops, lines, strict=True)]
    assert sorted(lines) == [1, 1, 2]
    assert middles[1] - middles[0] == pytest.approx(middles[2] - middles[1])
    assert claim_plates(tmp_path / "none.yaml", board) == {}


def test_points_are_written_as_points(tmp_path):
    file = tmp_path / "pictures.yaml"
    file.write_text(PLATES.replace("three: films", "three: films, in points"))
    of = {"kind": "descriptive", "text": "So.", "source": "ours", "published": None}
    claim = Claim("three", metric="test/probe", **of)
    line = Verdict(claim, "measured", "", estimate([0.01, 0.02, 0.03]))
    (chart,) = claim_plates(file, [line])["empty"].charts
    assert chart.data["empty_0"]["mean"] == [2.0]
    assert ">points<" in drawn(*paper_plate(Plate("x", [chart])), PAPER_CONFIG)


def test_the_square_of_a_trained_network_stands_before_one_of_more_seeds():
    cells = ("qnorm", "dnorm", "dot")
    short = [comparison(c, "cells_simclr · a", -0.1, n=10, steps=(156, 156)) for c in cells]
    long = [comparison(c, "cells_simclr · b", -0.3, n=3, steps=(3125, 3125)) for c in cells]
    floor = [
        comparison(c, "cells_simclr · c", 9.0, steps=(5000, 5000), at_floor=True) for c in cells
    ]
    found = squares([*short, *floor, *long])
    assert found is not None
    assert found.data["squares"]["mean"] == [0, -0.3, -0.3, -0.3]


def test_verdicts_share_an_axis_of_margins():
    lines = [verdict("near", [0.01, 0.03, 0.02], 0.04), verdict("far", [1.0, 1.1, 1.2], 0.1)]
    chart, data = forest(lines)
    assert data["verdicts"]["mean"] == [0.5, 11]
    assert data["verdicts"]["row"] == [0, 1]
    assert data["verdicts"]["beyond"] == ["no", "right"]
    # What lies beyond the axis stands at its end: the numbers beside it say how far.
    assert chart["layer"][2]["encoding"]["x"]["scale"] == {
        "domain": [-FARTHEST, FARTHEST],
        "clamp": True,
    }


@pytest.mark.parametrize("missing", ["qnorm", "dnorm", "dot"])
def test_published_squares_alone_make_no_picture(missing):
    paper = [
        comparison(c, "contriever, fine-tuned", 0.1, **PUBLISHED)
        for c in ("qnorm", "dnorm", "dot")
        if c != missing
    ]
    assert squares(paper) is None
