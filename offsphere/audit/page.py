"""The page of an audit: one HTML file that needs nothing else, readable on a phone and at night.

What it says is read from the report's table; how it looks is in templates/audit.html.j2.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from offsphere.audit.advice import RULES
from offsphere.audit.measures import Curve
from offsphere.audit.report import Report
from offsphere.audit.scoring import LEVEL
from offsphere.audit.search import Direction
from offsphere.audit.table import HALF
from offsphere.audit.words import number, percent, points, shown_remedies
from offsphere.evaluation.retrieval import same_ranking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#012345"
"""Stands for the page's own text colour, light or dark."""
COLOURS = ("#3d7dca", "#d9822b")
"""Readable on white and on black, and for colour-blind readers."""
PLOT = (4.6, 2.9)
SIDE_COLUMNS = {
    "norm_{}_mean": "mean norm",
    "norm_{}_cv": "CV",
    "norm_{}_q05": "5 %",
    "norm_{}_q50": "median",
    "norm_{}_q95": "95 %",
    "{}_mean_cosine": "mean cosine",
    "{}_mean_share": "share of the mean",
    "{}_top_share": "share of the top component",
}


class Grid(NamedTuple):
    """A table as it is shown."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Drawing(NamedTuple):
    """A chart as SVG, with its content in words."""

    svg: str
    told: str
    caption: str


def page(report: Report) -> str:
    """The whole page."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("offsphere.audit"), autoescape=True, trim_blocks=True
    )
    return environment.get_template("audit.html.j2").render(
        report=report,
        level=LEVEL,
        rules=RULES,
        sets=[_data(report, *x) for x in zip(report.told, report.directions, strict=True)],
    )


def _data(report: Report, told: str, directions: Sequence[Direction]) -> dict[str, Any]:
    first, table = directions[0], report.table
    place, histograms = (first.data, first.title), _curves(report, first, "norms")
    sides = [
        [x.name, *(number(table.value(*place, metric=m.format(x.name))) for m in SIDE_COLUMNS)]
        for x in histograms
    ]
    facts = {
        name: number(table.value(*place, metric=name))
        for name in ("gap", "gap_raw", "norm_ratio", "log_norm_cosine_correlation")
    }
    return {
        "name": first.data,
        "told": told,
        "sides": Grid(["side", *SIDE_COLUMNS.values()], sides),
        "names": [x.name for x in histograms],
        **facts,
        "drawings": [_histogram(report, first), *(_right_by_norm(report, x) for x in directions)],
        "directions": [_direction(report, x) for x in directions],
    }


def _direction(report: Report, words: Direction) -> dict[str, Any]:
    table, place = report.table, (words.data, words.title)
    rows = []
    for cells in same_ranking(report.how.cells, words.side):
        shares = [table.get(*place, cells[0], metric) for metric in words.metrics]
        gain = table.get(*place, cells[0], f"{words.metric}_minus_cosine")
        hubness = (
            table.value(*place, cells[0], f"hubness_{kind}")
            for kind in ("skewness", "norm_correlation")
        )
        rows.append(
            [
                " = ".join(cells),
                *(percent(x) if x else "" for x in shares),
                points(gain) if gain and "cosine" not in cells else "",
                *(number(x) for x in hubness),
            ]
        )
    chance = (f"{table.value(*place, 'chance', metric):.1%}" for metric in words.metrics)
    k = table.value(*place, metric="hubness_neighbours")
    header = [
        "scored with", *words.metrics, f"{words.metric} minus cosine",
        f"hubness (skewness, k = {k:.0f})", "hubness with norm (correlation)",
    ]  # fmt: skip
    counts = {
        kind: f"{table.value(*place, report.how.own, f'answers_{kind}'):.0f}"
        for kind in ("right", "wrong", "undecided")
    }
    level = table.value(*place, metric="remedies_level")
    remedies = shown_remedies(table, words, report.problems)
    contrasts = sum(x.gain is not None for x in remedies)
    return {
        "title": words.title,
        "query": words.query,
        "examples": words.examples,
        "queries": f"{table.value(*place, metric='queries'):.0f}",
        "scored": Grid(header, [*rows, ["chance", *chance, "", "", ""]]),
        **counts,
        "separations": _separations(report, words),
        "fitted_on": f"{table.value(*place, metric='fitted_on'):.0f}",
        "judged_on": f"{table.value(*place, metric='judged_on'):.0f}",
        "level": f"{level:.0%}",
        "together": f"{1 - (1 - level) * contrasts:.0%}",
        "remedies": _remedies(report, words),
        "forest": _forest(report, words),
    }


def _separations(report: Report, words: Direction) -> Grid:
    def row(title: str, name: str) -> list[str]:
        found = (
            report.table.get(words.data, words.title, report.how.own, f"{name}_{kind}")
            for kind in ("auroc", "cohens_d")
        )
        cells = [f"{x:.2f}" for x in found if x is not None]
        return [title, *(cells or ["nothing to compare", ""])]

    return Grid(
        ("norm of", "AUROC (right above wrong)", "Cohen's d (right minus wrong)"),
        [
            row(f"the query ({words.query})", "query_norm"),
            row(f"the chosen candidate ({words.candidates})", "answer_norm"),
        ],
    )


def _remedies(report: Report, words: Direction) -> Grid:
    table, place, rows = report.table, (words.data, words.title), []
    for name, value, gain, remark in shown_remedies(table, words, report.problems):
        told = table.get(*place, name, f"top_score_auroc{HALF}")
        skewness = table.get(*place, name, f"hubness_skewness{HALF}")
        rows.append(
            [
                name,
                value,
                points(gain) if gain else remark,
                f"{told:.2f}" if told else "",
                number(skewness.value) if skewness else "",
            ]
        )
    return Grid(
        ("remedy", words.hit, "minus cosine", "AUROC of the top score", "hubness (skewness)"), rows
    )


def _curves(report: Report, words: Direction, kind: str) -> list[Curve]:
    place = (words.data, words.title, kind)
    return [x for x in report.curves if (x.data, x.direction, x.kind) == place]


def _histogram(report: Report, words: Direction) -> Drawing:
    figure, axes = _plot("norm / mean norm of its side", "density")
    told = []
    for side, colour in zip(_curves(report, words, "norms"), COLOURS, strict=True):
        mean, cv = (
            report.table.value(words.data, words.title, metric=f"norm_{side.name}_{x}")
            for x in ("mean", "cv")
        )
        edges = [edge / (mean or 1.0) for edge in side.x]
        weight = sum(side.y) * (edges[1] - edges[0])
        axes.stairs([n / weight for n in side.y], edges, color=colour, lw=2, label=side.name)
        told.append(f"{side.name} mean {number(mean)}, CV {number(cv)}")
    axes.legend(frameon=False, labelcolor=INK)
    return _drawing(
        figure,
        f"Histogram of embedding norms: {', '.join(told)}.",
        "Distribution of the norms",
    )


def _right_by_norm(report: Report, words: Direction) -> Drawing:
    (curve,) = _curves(report, words, "right by norm")
    figure, axes = _plot(f"norm of the {words.query}", "share right")
    axes.plot(curve.x, curve.y, marker="o", color=COLOURS[0])
    axes.set_ylim(bottom=0)
    told = (
        f"Share of right answers in {len(curve.x)} groups by query norm: from {curve.y[0]:.0%} for "
        f"the shortest {words.query} embeddings to {curve.y[-1]:.0%} for the longest."
    )
    return _drawing(figure, told, f"{words.title}: right answers by the norm of the query")


def _forest(report: Report, words: Direction) -> Drawing:
    table = report.table
    rows = [
        (
            " = ".join(cells),
            table.get(words.data, words.title, cells[0], f"{words.metric}_minus_cosine"),
        )
        for cells in same_ranking(report.how.cells, words.side)
        if "cosine" not in cells
    ]
    rows += [(x.name, x.gain) for x in shown_remedies(table, words, report.problems)]
    gains = [(name, gain) for name, gain in rows if gain is not None]
    figure, axes = _plot(f"{words.metric} minus cosine, points", "")
    for place, (_, gain) in enumerate(gains):
        axes.plot((100 * gain.low, 100 * gain.high), (place, place), color=COLOURS[0], lw=2)
        axes.plot(100 * gain.value, place, "o", color=COLOURS[0])
    axes.axvline(0, color=INK, lw=1, ls=":")
    axes.set_yticks(range(len(gains)), [name for name, _ in gains])
    axes.invert_yaxis()
    told = "; ".join(f"{name} {points(gain)}" for name, gain in gains)
    return _drawing(
        figure,
        f"Differences to cosine with intervals: {told}.",
        f"{words.title}: difference to cosine",
    )


def _plot(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=PLOT, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.tick_params(colors=INK)
    axes.spines[:].set_color(INK)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _drawing(figure: Figure, told: str, caption: str) -> Drawing:
    """The plot as SVG in the page's own text colour."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": told}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue().partition("<svg ")[2].replace(INK, "currentColor")
    return Drawing(re.sub(r'<g id="[^"]*"', "<g", svg), told, caption)  # ids are in every plot
