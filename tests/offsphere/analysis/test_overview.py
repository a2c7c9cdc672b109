"""The pictures of the answer show the numbers they are given."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from offsphere.analysis.claim_file import Claim
from offsphere.analysis.claims import Verdict
from offsphere.analysis.digest import Comparison
from offsphere.analysis.overview import FARTHEST, forest, paper_chart, squares, symmetry
from offsphere.analysis.stats import estimate
from offsphere.estimate import Estimate
from offsphere.page.charts import drawn


def comparison(cell: str, where: str, mean: float, *, n: int = 5, **others: Any) -> Comparison:
    low, high = (mean - 0.1, mean + 0.1) if n else (math.nan, math.nan)
    kind = "symmetric" if where.startswith("cells_simclr") else "asymmetric"
    task = "Two views of an image" if kind == "symmetric" else "Query and document"
    ratio = Estimate(mean, low, high, n)
    runs = frozenset(f"{task}-{cell}-seed{seed}" for seed in range(n))
    return Comparison(
        **{"kind": kind, "task": task, "where": where, "setting": "", "source": "ours"}
        | {"metric": "test/x", "cell": cell, "ratio": ratio, "runs": runs}
        | others
    )


OURS = [
    *(comparison(c, "cells_simclr · cells", m) for c, m in (("dot", -0.2), ("qnorm", -0.1))),
    comparison("dot", "cells_simclr · primary", -0.3, n=10),
    comparison("dot", "cells_retrieval · pretrained", 0.4),
]
SIDES = ("discarded", "kept")
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
    svg = drawn(paper_chart(found), found.data)
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
    svg = drawn(paper_chart(found), found.data)
    assert all(x in svg for x in ("−0.200", "[−0.300, −0.100]"))


def verdict(name: str, values: list[float], margin: float) -> Verdict:
    claim = Claim(name, "primary", "It is so.", "ours", None, margin=margin)
    return Verdict(claim, "shown", "", estimate(values))


def test_verdicts_share_an_axis_of_margins():
    lines = [verdict("near", [0.01, 0.03, 0.02], 0.04), verdict("far", [1.0, 1.1, 1.2], 0.1)]
    chart, data = forest(lines)
    assert data["verdicts"]["mean"] == [0.5, 11]
    assert data["verdicts"]["row"] == [0, 1]
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
