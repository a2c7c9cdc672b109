"""The three pictures of the answer show the numbers they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offsphere.analysis.digest import Comparison
from offsphere.analysis.overview import draw_squares, draw_symmetry
from offsphere.estimate import Estimate


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
PUBLISHED = {"n": 0, "setting": "contriever", "source": "2602.09229v1, table 1"}
PAPER = comparison("dot", "contriever, fine-tuned", 0.06, **PUBLISHED)


def marks(figure) -> list[tuple[float, bool]]:
    """Where the square marks stand, and which are filled."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "s"]
    return [(line.get_xdata()[0], line.get_markerfacecolor() != "white") for line in lines]


def test_dot_over_cosine_by_symmetry_with_the_most_seeds_of_each_task():
    others = [
        # Other names of runs with the same numbers: they measured something else besides.
        comparison("dot", "symmetry · text", 0.4, runs=frozenset("abcde")),
        comparison("dot", "scale · given", 0.1, setting="fixed", runs=frozenset("fghij")),
        comparison("dot", "cells_simclr · tuned", -0.4, runs=frozenset("k"), n=1, at_floor=True),
    ]
    figure = draw_symmetry([*OURS, PAPER, *others])
    assert marks(figure) == [
        (0.4, True), (0.06, False), (0.1, True), (-0.3, True), (-0.4, True),
    ]  # fmt: skip
    labels = [text.get_text().strip() for text in figure.axes[0].get_yticklabels()]
    assert labels == [
        "different roles",
        "Query and document (5 seeds)",
        "Query and document (contriever, table 1)",
        "Query and document (fixed, 5 seeds)",
        "interchangeable",
        "Two views of an image (cells_simclr · primary, 10 seeds)",
        "Two views of an image (cells_simclr · tuned, 1 seed, at the floor)",
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
        comparison(c, "contriever, fine-tuned", 0.1, **PUBLISHED)
        for c in ("qnorm", "dnorm", "dot")
        if c != missing
    ]
    assert draw_squares(paper) is None
