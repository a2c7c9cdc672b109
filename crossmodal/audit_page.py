"""The page of an audit: one HTML file that needs nothing else, readable on a phone and at night."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from crossmodal.audit_advice import points, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from crossmodal.audit import Report
    from crossmodal.audit_measures import (
        Confidence,
        DataAudit,
        DirectionAudit,
        Estimate,
        Separation,
        Side,
    )
    from crossmodal.audit_probe import Probe

INK = "#012345"
"""Stands for the page's own text colour, light or dark."""

COLOURS = ("#3d7dca", "#d9822b")
"""Readable on white and on black, and for colour-blind readers."""

PLOT = (4.6, 2.9)
STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: auto; padding: 0 1rem 3rem;
  overflow-wrap: anywhere; }
.headline { font-size: 1.2rem; font-weight: 600; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); }
table { border-collapse: collapse; } td { white-space: nowrap; overflow-wrap: normal; }
th { overflow-wrap: normal; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { vertical-align: bottom; }
.advice { background: var(--soft); border-left: 4px solid #3d7dca; padding: .5rem 1rem .5rem 2rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; min-width: 0;
  max-width: 100%; }
svg { max-width: 100%; height: auto; } figcaption, .note { font-size: .9rem; opacity: .85; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e4e4e4; } }
@media (prefers-color-scheme: light) { body { background: #fff; color: #1c1c1c; } }
"""


def page(report: Report) -> str:
    """The whole page."""
    name = f"{report.model} {report.pretrained}"
    parts = [
        f"<h1>Does magnitude carry information in {escape(name)}?</h1>",
        f'<p class="headline">{escape(report.headline)}</p>',
        _paragraph(
            f"Trained with {report.trained_with}; answers are right or wrong as scored with "
            f"{report.own}. In brackets: {report.level:.0%} intervals from {report.resamples} "
            "bootstrap samples over images; Wilson's, and Newcombe's of differences, where fewer "
            "than five answers are right, wrong or changed."
        ),
        _advice(report),
        *(_data(found) for found in report.data),
    ]
    if report.probe is not None:
        parts.append(_probe(report.probe))
    parts.append(_method(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Audit of {escape(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _advice(report: Report) -> str:
    parts = ["<h2>Recommendation</h2>"]
    for advice in report.advice:
        parts.append(f"<h3>{escape(advice.data)}: {escape(advice.direction)}</h3>")
        parts.append('<ul class="advice">')
        parts += [
            f"<li><strong>{escape(said.verdict)}.</strong> {escape(said.text)}</li>"
            for said in advice.statements
        ]
        parts.append("</ul>")
    return "\n".join(parts)


def _data(found: DataAudit) -> str:
    skipped = f", {found.skipped} damaged left out" if found.skipped else ""
    sides = [
        [
            name,
            *(_number(side.norms[key]) for key in ("mean", "cv", "q05", "q50", "q95")),
            *(_number(side.shape[key]) for key in ("mean_cosine", "mean_share", "top_share")),
        ]
        for name, side in found.sides.items()
    ]
    header = (
        "side", "mean norm", "CV", "5 %", "median", "95 %",
        "mean cosine", "share of the mean", "share of the top component",
    )  # fmt: skip
    gap = found.gap
    return "\n".join(
        [
            f"<h2>{escape(found.data)}</h2>",
            _paragraph(f"{found.images} images, {found.texts} texts{skipped}."),
            _table(header, sides),
            _paragraph(
                f"Modality gap: the centroids of the unit vectors are {_number(gap['gap'])} apart "
                f"(raw {_number(gap['gap_raw'])}); image norms are {_number(gap['norm_ratio'])} "
                "times as large as text norms. Correlation of log norms with cosine over true "
                f"pairs: {_number(found.log_norm_cosine_correlation)}."
            ),
            '<div class="plots">',
            _histogram(found.sides),
            *(_right_by_norm(direction) for direction in found.directions),
            "</div>",
            *(_direction(direction) for direction in found.directions),
        ]
    )


def _direction(found: DirectionAudit) -> str:
    metrics = list(found.scored[0].metrics)
    scored = [
        [
            " = ".join(row.cells),
            *(_percent(row.metrics[name]) for name in metrics),
            "" if "cosine" in row.cells else points(row.minus_cosine[found.metric]),
            _number(row.hubness["skewness"]),
            _number(row.hubness["norm_correlation"]),
        ]
        for row in found.scored
    ]
    scored.append(["chance", *(f"{found.chance[name]:.1%}" for name in metrics), "", "", ""])
    header = [
        "scored with", *metrics, f"{found.metric} minus cosine",
        f"hubness (skewness, k = {found.neighbours})", "hubness with norm (correlation)",
    ]  # fmt: skip
    remedies = found.remedies
    rows = [
        [
            row.name,
            "" if row.problem else f"{row.recall:.1%}",
            row.problem
            or (
                points(row.minus_cosine)
                if row.minus_cosine
                else ("" if row.name == "cosine" else "same ranking by construction")
            ),
            "" if row.top_score is None else spread(row.top_score.auroc),
            "" if row.hubness is None else _number(row.hubness["skewness"]),
        ]
        for row in remedies.rows
    ]
    return "\n".join(
        [
            f"<h3>{escape(found.title)}: the {escape(found.query)} is the query</h3>",
            _paragraph(
                f"{found.queries} queries. A query's own norm never changes its ranking, so cells "
                "with the same exponent on the candidates' side tie by construction and share a "
                "row."
            ),
            _table(header, scored),
            _separations(found.confidence, found.query, found.candidates),
            _paragraph(
                f"Post-hoc remedies, fitted on {remedies.reference} images and judged on "
                f"{remedies.judged} others (fewer candidates, so recall is higher than above); "
                f"intervals of differences at {remedies.level:.0%} each, for "
                f"{1 - (1 - remedies.level) * _contrasts(found):.0%} together."
            ),
            _table(
                ("remedy", found.metric, "minus cosine", "AUROC of the top score",
                 "hubness (skewness)"),
                rows,
            ),
            _forest(found),
        ]
    )  # fmt: skip


def _contrasts(found: DirectionAudit) -> int:
    """How many remedies share the error that is allowed."""
    return sum(row.minus_cosine is not None for row in found.remedies.rows)


def _separations(found: Confidence, query: str, candidates: str) -> str:
    def cells(told: Separation | None) -> list[str]:
        if told is None:
            return ["nothing to compare", ""]
        return [spread(told.auroc), spread(told.cohens_d)]

    undecided = f", {found.undecided} tied and left out" if found.undecided else ""
    return _paragraph(
        f"{found.right} answers right, {found.wrong} wrong{undecided}. Do norms tell them apart?"
    ) + _table(
        ("norm of", "AUROC (right above wrong)", "Cohen's d (right minus wrong)"),
        [
            [f"the query ({query})", *cells(found.query_norm)],
            [f"the chosen candidate ({candidates})", *cells(found.answer_norm)],
        ],
    )


def _probe(found: Probe) -> str:
    names = {"cosine": "cosine", "dot": "dot", "centred": "cosine after centring"}
    rows = [
        [
            names[name],
            _percent(near.same_template),
            _percent(near.same_noun),
            "" if name == "cosine" else points(near.same_noun_minus_cosine),
        ]
        for name, near in found.nearest.items()
    ]
    rows.append(
        ["chance", f"{found.chance_same_template:.1%}", f"{found.chance_same_noun:.1%}", ""]
    )
    header = (
        "nearest text by", "same template, other noun", "same noun, other template",
        "same noun minus cosine",
    )  # fmt: skip
    return "\n".join(
        [
            "<h2>Prompt probe: shared syntax or shared meaning?</h2>",
            _paragraph(
                f"{found.nouns} nouns in {found.templates} templates (the mean for centring comes "
                f"from {found.reference_nouns} other nouns). Mean cosine of texts with one "
                f"template and different nouns: {spread(found.same_template)}; with one noun and "
                f"different templates: {spread(found.same_noun)}; difference "
                f"{spread(found.excess)}. Intervals over nouns."
            ),
            _table(header, rows),
        ]
    )


def _method(report: Report) -> str:
    rules = report.rules
    return "<h2>How this was measured</h2>" + "".join(
        _paragraph(text)
        for text in (
            "Cosine, dot and one-sided scores come from the same embeddings; differences are "
            "paired over the same drawn images, captions going with their image.",
            "Cohen's d and AUROC compare queries answered right with queries answered wrong; "
            "comparing matched with mismatched pairs would be zero by construction.",
            "The reference half for remedies is the first half of a permutation of the images by "
            f"seed {report.seed}; class texts are known in advance and serve both halves; no "
            "labels are used in fitting.",
            f"Rules (thresholds are ours): a difference of less than {rules.margin:.0%} does "
            f"not matter; fewer than {rules.least_images} images, or "
            f"{rules.least_of_a_kind} right or wrong answers, decide nothing; norms with a CV "
            f"below {rules.constant_cv} are constant; an AUROC within {rules.weak_auroc} of "
            "0.5 is called weak; where all scores may be guesses, nothing else is said. "
            "Otherwise a difference counts if its interval excludes 0.",
        )
    )


def _histogram(sides: dict[str, Side]) -> str:
    figure, axes = _plot("norm / mean norm of its side", "density")
    for (name, side), colour in zip(sides.items(), COLOURS, strict=True):
        edges = [edge / (side.norms["mean"] or 1.0) for edge in side.edges]
        weight = sum(side.counts) * (edges[1] - edges[0])
        axes.stairs([n / weight for n in side.counts], edges, color=colour, lw=2, label=name)
    axes.legend(frameon=False, labelcolor=INK)
    means = ", ".join(
        f"{name} mean {_number(side.norms['mean'])}, CV {_number(side.norms['cv'])}"
        for name, side in sides.items()
    )
    return _figure(figure, "Distribution of the norms", f"Histogram of embedding norms: {means}.")


def _right_by_norm(found: DirectionAudit) -> str:
    norms, shares = found.confidence.mean_norm, found.confidence.share_right
    figure, axes = _plot(f"norm of the {found.query}", "share right")
    axes.plot(norms, shares, marker="o", color=COLOURS[0])
    axes.set_ylim(bottom=0)
    told = (
        f"from {shares[0]:.0%} for the shortest {found.query} embeddings to {shares[-1]:.0%} for "
        "the longest"
    )
    return _figure(
        figure,
        f"{found.title}: right answers by the norm of the query",
        f"Share of right answers in {len(norms)} groups by query norm: {told}.",
    )


def _forest(found: DirectionAudit) -> str:
    rows = [
        (" = ".join(row.cells), row.minus_cosine[found.metric])
        for row in found.scored
        if "cosine" not in row.cells
    ]
    rows += [(row.name, row.minus_cosine) for row in found.remedies.rows if row.minus_cosine]
    figure, axes = _plot(f"{found.metric} minus cosine, points", "")
    for place, (_, gain) in enumerate(rows):
        axes.plot((100 * gain.low, 100 * gain.high), (place, place), color=COLOURS[0], lw=2)
        axes.plot(100 * gain.value, place, "o", color=COLOURS[0])
    axes.axvline(0, color=INK, lw=1, ls=":")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    told = "; ".join(f"{name} {points(gain)}" for name, gain in rows)
    return _figure(
        figure,
        f"{found.title}: difference to cosine",
        f"Differences to cosine with intervals: {told}.",
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


def _figure(figure: Figure, caption: str, told: str) -> str:
    """The plot as SVG in the page's own text colour, with its content in words."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": told}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    drawing = text.getvalue().partition("<svg ")[2].replace(INK, "currentColor")
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # the same in every plot
    return (
        f'<figure><svg role="img" aria-label="{escape(told)}" {drawing}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _table(header: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(kind: str, row: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(x)}</{kind}>" for x in row) + "</tr>"

    body = "\n".join(cells("td", row) for row in rows)
    return (
        f'<div class="wide" tabindex="0"><table><thead>{cells("th", header)}</thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _percent(found: Estimate) -> str:
    return f"{found.value:.1%} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
