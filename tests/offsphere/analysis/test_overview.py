"""The three pictures of the answer show the numbers they are given."""

from __future__ import annotations

import math

import pytest

from offsphere.analysis.digest import Comparison
from offsphere.analysis.overview import draw_squares, draw_symmetry
from offsphere.analysis.panels import Measure


def comparison(cell: str, where: str, mean: float, *, n: int = 5, source: str = "ours"):
    low, high = (mean - 0.1, mean + 0.1) if n else (math.nan, math.nan)
    kind = "symmetric" if where.startswith("cells_simclr") else "asymmetric"
    task = "Two views of an image" if kind == "symmetric" else "Query and document"
    ratio = Measure(mean, low, high, n)
    return Comparison(kind, task, where, source, "test/x", cell, ratio)


OURS = [
    *(comparison(c, "cells_simclr · cells", m) for c, m in (("dot", -0.2), ("qnorm", -0.1))),
    comparison("dot", "cells_simclr · primary", -0.3, n=10),
    comparison("dot", "cells_retrieval · pretrained", 0.4),
]
PAPER = comparison("dot", "contriever, fine-tuned", 0.06, n=0, source="2602.09229v1, table 1")


def marks(figure) -> list[tuple[float, bool]]:
    """Where the square marks stand, and which are filled."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "s"]
    return [(line.get_xdata()[0], line.get_markerfacecolor() != "white") for line in lines]


def test_dot_over_cosine_by_symmetry_with_the_most_seeds_of_each_study():
    figure = draw_symmetry([*OURS, PAPER])
    assert marks(figure) == [(0.4, True), (0.06, False), (-0.3, True)]
    labels = [text.get_text().strip() for text in figure.axes[0].get_yticklabels()]
    assert labels == [
        "different roles",
        "Query and document (cells_retrieval, 5 seeds)",
        "Query and document (contriever, table 1)",
        "interchangeable",
        "Two views of an image (cells_simclr, 10 seeds)",
    ]


def test_a_square_needs_all_corners_and_ours():
    assert draw_symmetry([PAPER]) is None
    assert draw_squares([*OURS, PAPER]) is None
    figure = draw_squares([*OURS, comparison("dnorm", "cells_simclr · cells", 0.05)])
    (axis,) = figure.axes
    assert axis.images[0].get_array().tolist() == [[0.0, -0.1], [0.05, -0.2]]
    assert [text.get_text().split("\n")[0] for text in axis.texts] == [
        "cosine", "qnorm", "dnorm", "dot",
    ]  # fmt: skip
    assert axis.texts[3].get_text() == "dot\n-0.200\n[-0.300, -0.100]"


@pytest.mark.parametrize("missing", ["qnorm", "dnorm", "dot"])
def test_published_squares_alone_make_no_picture(missing):
    paper = [
        comparison(c, "contriever, fine-tuned", 0.1, n=0, source="2602.09229v1, table 1")
        for c in ("qnorm", "dnorm", "dot")
        if c != missing
    ]
    assert draw_squares(paper) is None
