"""The page of an audit: one HTML file that needs nothing else, readable on a phone and at night.

What it says is read from the report's table; how it looks is in templates/audit.html.j2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from offsphere.audit.advice import RULES
from offsphere.audit.measures import Curve
from offsphere.audit.report import Report
from offsphere.audit.scoring import LEVEL
from offsphere.audit.search import Direction
from offsphere.audit.table import HALF
from offsphere.audit.words import number, percent, points, shown_remedies
from offsphere.estimate import Estimate
from offsphere.page.charts import Chart, columns, drawn, scales
from offsphere.page.engine import render
from offsphere.page.looks import LEVEL_LOOKS

BLUE = LEVEL_LOOKS[1].paint
SIDE_COLUMNS = {
    "norm_{}_mean": "mean norm",
    "norm_{}_cv": "CV",
    "norm_{}_q05": "5 %",
    "norm_{}_q50": "median",
    "norm_{}_q95": "95 %",
    "{}_mean_cosine": "mean cosine",
    "{}_mean_share": "share of the mean",
    "{}_top_share": "share of the top component",
    "norm_{}_with_length": "norm with length",
    "norm_{}_with_frequency": "norm with token frequency",
}
STORED = {"int8": "int8", "binary": "bits"}


class Grid(NamedTuple):
    """A table as it is shown."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Drawing(NamedTuple):
    """A chart as SVG, with its content in words."""

    svg: Markup
    told: str
    caption: str


def page(report: Report) -> str:
    """The whole page."""
    return render(
        "offsphere.audit",
        "audit.html.j2",
        {},
        report=report,
        level=LEVEL,
        rules=RULES,
        sets=[_data(report, *x) for x in zip(report.told, report.directions, strict=True)],
    )


def _data(report: Report, told: str, directions: Sequence[Direction]) -> dict[str, Any]:
    first, table = directions[0], report.table
    place, histograms = first.place, _curves(report, first, "norms")
    shown = {
        metric: title
        for metric, title in SIDE_COLUMNS.items()
        if any(table.get(*place, metric=metric.format(x.name)) for x in histograms)
    }
    sides = [
        [x.name, *(number(table.value(*place, metric=m.format(x.name))) for m in shown)]
        for x in histograms
    ]
    drawings = [_histogram(report, first, "norms", "Distribution of the norms")]
    for words in directions:
        if _curves(report, words, "norms by relevance"):
            caption = f"{words.title}: norms of what answers, and of what answers nobody"
            drawings.append(_histogram(report, words, "norms by relevance", caption))
        drawings += [_right_by_norm(words, x) for x in _curves(report, words, "right by norm")]
    facts = {
        name: number(table.value(*place, metric=name))
        for name in ("gap", "gap_raw", "norm_ratio", "log_norm_cosine_correlation")
    }
    return {
        "name": first.data,
        "told": told,
        "sides": Grid(["side", *shown.values()], sides),
        "names": [x.name for x in histograms],
        **facts,
        "drawings": drawings,
        "directions": [_direction(report, x) for x in directions],
    }


def _direction(report: Report, words: Direction) -> dict[str, Any]:
    table, place = report.table, words.place
    rows = []
    for cells in report.how.groups(words):
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
        "relevance": _relevance(report, words),
        "stored": _stored(report, words),
        "clustered": _clustered(report, words),
        "ask": words.ask,
        "compared": _compared(report, words),
        "forest": _forest(report, words),
    }


def _compared(report: Report, words: Direction) -> str:
    """How many candidates were compared where these must fit into memory; empty if all were."""
    all_of, some = (
        report.table.value(*words.place, metric=name)
        for name in ("candidates", "candidates_compared")
    )
    return f"{some:,.0f} of {all_of:,.0f}" if some < all_of else ""


def _relevance(report: Report, words: Direction) -> Grid | None:
    """What norms say of relevance beside permuted ones; None where that was not measured."""
    table, place, metric = report.table, words.place, words.metric
    rows = []
    if d := table.get(*place, metric="cohens_d"):
        null, p = table.get(*place, metric="cohens_d_permuted"), table.get(*place, "", "cohens_d_p")
        rows.append(["Cohen's d of the norms", f"{d:+.2f}", _range(null, "+.2f"), number_of(p)])
    if null := table.get(*place, "dot", f"{metric}_permuted"):
        own, p = (table.get(*place, "dot", x) for x in (metric, f"{metric}_permuted_p"))
        kept = f"{own.value:.1%}" if own else ""
        rows.append([f"{metric} by dot", kept, _range(null.times(100), ".1f"), number_of(p)])
    if leverage := table.get(*place, metric="norm_leverage"):
        share = leverage.value**2 / (1 + leverage.value**2)
        told = f"{leverage.value:.2f} ({share:.0%} of the variance of all scores by dot)"
        rows.append(["CV x mean cosine / deviation of cosines", told, "", ""])
    if kept := table.get(*place, "dot", "nearest_kept"):
        k = table.value(*place, metric="hubness_neighbours")
        rows.append([f"of cosine's {k:.0f} nearest dot keeps", percent(kept), "", ""])
    header = ("what norms say", "measured", "with permuted norms", "p")
    return Grid(header, rows) if rows else None


def _range(found: Estimate | None, spec: str) -> str:
    return "" if found is None else f"{found.low:{spec}} to {found.high:{spec}}"


def number_of(found: Estimate | None) -> str:
    """Three digits, or nothing."""
    return "" if found is None else number(found.value)


def _stored(report: Report, words: Direction) -> Grid | None:
    """What int8 and bits cost under each cell; None where that was not measured."""
    rows = []
    for cells in report.how.groups(words):
        row = [" = ".join(cells)]
        for kind in STORED:
            metric = f"{words.metric}_{kind}"
            value = report.table.get(*words.place, cells[0], metric)
            change = report.table.get(*words.place, cells[0], f"{metric}_minus_full")
            if value is None or change is None:
                return None
            row += [f"{value.value:.1%}", points(change)]
        rows.append(row)
    names = (name for x in STORED.values() for name in (f"{words.metric}, {x}", "minus full"))
    return Grid(("scored with", *names), rows)


def _clustered(report: Report, words: Direction) -> str:
    """How well k-means finds the classes, in words; empty where there are none."""
    unit, raw = (report.table.get(*words.place, x, "clustering_nmi") for x in ("cosine", "dot"))
    if unit is None or raw is None:
        return ""
    return (
        f"k-means and the labels share {unit.value:.2f} of their information (NMI) on normalised "
        f"vectors and {raw.value:.2f} on raw ones."
    )


def _separations(report: Report, words: Direction) -> Grid:
    def row(title: str, name: str) -> list[str]:
        found = (
            report.table.get(*words.place, report.how.own, f"{name}_{kind}")
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
    table, place, rows = report.table, words.place, []
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
        ("remedy", words.metric, "minus cosine", "AUROC of the top score", "hubness (skewness)"),
        rows,
    )


def _curves(report: Report, words: Direction, kind: str) -> list[Curve]:
    place = (*words.place, kind)
    return [x for x in report.curves if (x.data, x.direction, x.kind) == place]


def _histogram(report: Report, words: Direction, kind: str, caption: str) -> Drawing:
    """Densities on one axis: of sides in units of their own mean, as these may be far apart."""
    rows, told = [], []
    sides = _curves(report, words, kind)
    for side in sides:
        middles = [(a + b) / 2 for a, b in itertools.pairwise(side.x)]
        mean = sum(x * n for x, n in zip(middles, side.y, strict=True)) / (sum(side.y) or 1)
        cv = report.table.value(*words.place, metric=f"norm_{side.name}_cv")
        if kind != "norms":
            told.append(f"{side.name} mean {number(mean)}")
            mean = 1.0
        else:
            told.append(f"{side.name} mean {number(mean)}, CV {number(cv)}")
        edges = [edge / (mean or 1.0) for edge in side.x]
        weight = sum(side.y) * (edges[1] - edges[0])
        heights = [0.0, *(n / weight for n in side.y), 0.0]  # a step up first, and one down last
        steps = zip([edges[0], *edges], heights, strict=True)
        rows += [{"side": side.name, "norm": x, "density": y} for x, y in steps]
    colours, _ = scales([side.name for side in sides], LEVEL_LOOKS[1:3])
    chart = {
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        "encoding": {
            "x": _axis("norm", "norm / mean norm of its side" if kind == "norms" else "norm"),
            "y": _axis("density", "density"),
            "color": {"field": "side", "type": "nominal", "scale": colours},
            "order": {"field": "order", "type": "quantitative"},
        },
    }
    numbered = [{**row, "order": k} for k, row in enumerate(rows)]
    return _drawing(
        chart,
        numbered,
        f"Histogram of embedding norms: {', '.join(told)}.",
        caption,
    )


def _right_by_norm(words: Direction, curve: Curve) -> Drawing:
    rows = [{"norm": x, "share": y} for x, y in zip(curve.x, curve.y, strict=True)]
    chart = {
        "mark": {"type": "line", "point": {"color": BLUE}, "color": BLUE, "strokeWidth": 2},
        "encoding": {
            "x": _axis("norm", f"norm of the {words.query}", scale={"zero": False}),
            "y": _axis("share", "share right", scale={"zero": True}),
        },
    }
    told = (
        f"Share of right answers in {len(curve.x)} groups by query norm: from {curve.y[0]:.0%} for "
        f"the shortest {words.query} embeddings to {curve.y[-1]:.0%} for the longest."
    )
    return _drawing(chart, rows, told, f"{words.title}: right answers by the norm of the query")


def _forest(report: Report, words: Direction) -> Drawing:
    """What each other score gains over cosine, with its interval, in points."""
    place, table = words.place, report.table
    found = {
        " = ".join(cells): table.get(*place, cells[0], f"{words.metric}_minus_cosine")
        for cells in report.how.groups(words)
        if "cosine" not in cells
    }
    remedies = shown_remedies(table, words, report.problems)
    found |= {f"{x.name} (half)": x.gain for x in remedies}
    gains = {name: gain for name, gain in found.items() if gain is not None}
    rows = [
        {"score": name, "value": x.value, "low": x.low, "high": x.high}
        for name, x in ((name, gain.times(100)) for name, gain in gains.items())
    ]
    y = {"field": "score", "type": "nominal", "sort": list(gains), "title": None}
    chart = {
        "layer": [
            {
                "mark": {"type": "rule", "strokeDash": [3, 3]},
                "encoding": {"x": {"datum": 0, "type": "quantitative"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "color": BLUE},
                "encoding": {
                    "x": _axis("low", "difference to cosine, points"),
                    "x2": {"field": "high"},
                    "y": y,
                },
            },
            {
                "mark": {"type": "point", "color": BLUE},
                "encoding": {"x": {"field": "value", "type": "quantitative"}, "y": y},
            },
        ],
    }
    told = "; ".join(f"{name} {points(gain)}" for name, gain in gains.items())
    return _drawing(
        {**chart, "height": 24 * len(rows)},
        rows,
        f"Differences to cosine with intervals: {told}.",
        f"{words.title}: difference to cosine",
    )


def _axis(field: str, title: str, scale: Chart | None = None) -> Chart:
    found: Chart = {"field": field, "type": "quantitative", "title": title}
    return found if scale is None else {**found, "scale": scale}


def _drawing(chart: Chart, rows: Sequence[dict[str, Any]], told: str, caption: str) -> Drawing:
    chart = {"width": 320, "height": 180, "data": {"name": "rows"}, **chart}
    return Drawing(Markup(drawn(chart, {"rows": columns(rows)})), told, caption)
