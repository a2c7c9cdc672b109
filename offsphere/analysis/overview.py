"""The charts of the whole answer: verdicts, pictures of claims, cells against cosine. No torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from offsphere.analysis.chart_data import SIDES, ends
from offsphere.analysis.charts import (
    WIDTH,
    Drawing,
    row_axis,
    template,
    tiles,
    told,
    zero_line,
)
from offsphere.analysis.claim_file import Claim
from offsphere.analysis.claims import Verdict, rests_on
from offsphere.analysis.conditions import steps_text
from offsphere.analysis.digest import Comparison
from offsphere.analysis.words import words_of
from offsphere.estimate import Estimate
from offsphere.names import CORNERS, SQUARE
from offsphere.page.charts import Chart, Columns, columns, drawn, write_figure
from offsphere.run import safe_yaml
from offsphere.share import CONFIGS

PICTURES = CONFIGS / "pictures.yaml"
CONTRASTS = "filled: ours, with 95 % intervals; hollow: published, no interval given"
KINDS = {"asymmetric": "different roles", "symmetric": "interchangeable", "control": "control"}
PUBLISHED_ENCODER = "contriever"
SQUARED = (
    "Two views of an image",
    "Image and text",
    "Query and document",
    "Two captions",
    "Two halves",
)
TRAINED = 1_000
"""Optimiser steps from which on a network counts as trained."""
LABEL = 28
"""Letters in a line of a row's name: a phone has no room for more beside the marks."""
FARTHEST = 4.0
"""Margins at which the axis of the verdicts ends."""


@dataclass(frozen=True)
class Overview:
    """A chart over several studies with its data and what can be chosen in it."""

    drawing: Drawing
    data: Mapping[str, Columns]
    controls: Mapping[str, Sequence[str]]
    title: str


class Plate(NamedTuple):
    """Charts that stand below each other under one title."""

    title: str
    charts: Sequence[Overview]
    caption: str = ""


def write_overview(found: Mapping[str, Plate], lines: Sequence[Verdict], folder: Path) -> None:
    """Write the charts that there are data for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plate in found.items():
        write_figure(*paper_plate(plate), folder / name)
    if measured := [line for line in lines if line.measured and line.claim.kind == "primary"]:
        chart, data = forest(measured)
        write_figure(chart, data, folder / "verdicts")


def overviews(lines: Sequence[Verdict], comparisons: Sequence[Comparison]) -> dict[str, Plate]:
    """The charts over all studies, by name: pictures of claims, then each cell against cosine."""
    single = {"symmetry": symmetry(comparisons), "squares": squares(comparisons)}
    return claim_plates(PICTURES, lines) | {
        name: Plate(found.title, [found]) for name, found in single.items() if found is not None
    }


def paper_plate(plate: Plate) -> tuple[Chart, dict[str, Columns]]:
    """A plate as one figure, and its data."""
    data = {name: columns for each in plate.charts for name, columns in each.data.items()}
    charts = [paper_chart(each) for each in plate.charts]
    if plate.title == plate.charts[0].title:
        return charts[0], data
    # What is chosen is one for all plots; flush: they lie below each other, whatever the length of
    # their labels.
    chosen = {each["name"]: each for chart in charts for each in chart.pop("params")}
    title = {"text": plate.title, "subtitle": plate.caption, "frame": "bounds", "offset": 16}
    stacked = {"vconcat": charts, "bounds": "flush", "spacing": 80}
    return {"title": title, "params": list(chosen.values()), **stacked}, data


def page_chart(overview: Overview) -> Chart:
    """The chart with what is chosen on the page."""
    drawing = overview.drawing
    filters = [{"filter": f"datum.{name} === {by}"} for name, by in drawing.chosen.items()]
    transform = [*filters, *drawing.chart["transform"]]
    return {**drawing.chart, "transform": transform, "params": _params(overview)}


def paper_chart(overview: Overview) -> Chart:
    """The chart with its first choice, or with one plot for each."""
    drawing = overview.drawing
    shown = [] if drawing.facet else [values[0] for values in overview.controls.values()]
    title = {"text": overview.title, "subtitle": ", ".join([drawing.caption, *shown])}
    if not drawing.caption:  # a panel of a plate, whose title says the rest
        title = {"text": overview.title, "fontSize": 11, "frame": "group"}
    if drawing.facet is None:
        return {**page_chart(overview), "width": 2 * WIDTH, "title": title}
    chart = {**drawing.chart, "params": _params(overview), "title": title}
    inside = {key: chart.pop(key) for key in ("layer", "height")}
    order = next(iter(overview.controls.values()))
    facet = {"field": drawing.facet, "type": "nominal", "sort": list(order)}
    split = {"facet": facet, "columns": 3, "spec": {**inside, "width": 0.7 * WIDTH}}
    own = {"scale": {"y": "independent"}} if drawing.facet == "plot" else {}
    return {**chart, **split, "resolve": own}


def forest(lines: Sequence[Verdict], *, bare: bool = False) -> tuple[Chart, dict[str, Columns]]:
    """Each claim's interval in margins, on one axis; `bare` has no names and no axis."""
    names = ["" if bare else line.claim.id for line in lines]
    axis = {"title": "measured / margin fixed in advance", "grid": not bare, "labels": not bare}
    axis |= {"ticks": not bare, "domain": not bare} | ({"title": None} if bare else {})
    chart = template(
        "forest",
        scale={"domain": [-FARTHEST, FARTHEST], "clamp": True},
        axis=axis,
        zero=zero_line(),
        y=row_axis(names, []),
        width=2 * WIDTH,
        height=len(lines) * (26 if bare else 20),
    )
    return chart, {"verdicts": columns(_in_margins(line, row) for row, line in enumerate(lines))}


def forest_row(line: Verdict) -> str:
    """One claim's interval as SVG for its row on the page."""
    chart, data = forest([line], bare=True)
    return drawn({**chart, "width": 260, "padding": 0}, data)


def _in_margins(line: Verdict, row: int) -> dict[str, Any]:
    found, unit = line.measured, line.claim.margin
    assert found is not None
    scaled = Estimate(found.value, found.low, found.high, found.n).times(1 / (unit or 1.0))
    beyond = "right" if scaled.value > FARTHEST else "left" if scaled.value < -FARTHEST else "no"
    return {
        "row": row,
        **ends(scaled),
        "beyond": beyond,
        "text": f"{line.claim.id}: {line.verdict}",
    }


def claim_plates(file: Path, lines: Sequence[Verdict]) -> dict[str, Plate]:
    """The pictures that a file makes of claims, those of which something was measured."""
    plates = safe_yaml.load(file.read_text(encoding="utf-8"), file) if file.exists() else []
    board = {line.claim.id: line for line in lines}
    found = {}
    for plate in plates:
        # The page of one study has its own claims only.
        own = [(panel, _rows_on(panel, board)) for panel in plate["panels"]]
        measured = [(p, rows) for p, rows in own if any(r.line and r.line.measured for r in rows)]
        charts = [
            claim_panel(panel, rows, f"{plate['id']}_{i}")
            for i, (panel, rows) in enumerate(measured)
        ]
        if charts:
            found[plate["id"]] = Plate(plate["title"], charts, CONTRASTS)
    return found


class Row(NamedTuple):
    """A claim and what it is called, or a heading."""

    words: str
    line: Verdict | None
    published: bool
    """Whether a published figure, if there is one, was made in the same way."""


def _rows_on(panel: Mapping[str, Any], board: Mapping[str, Verdict]) -> list[Row]:
    """A panel's rows, of the claims that are on the board."""
    rows = [(next(iter(row.items())), row.get("published", True)) for row in panel["rows"]]
    known = [row for row in rows if row[0][0] == "heading" or row[0][0] in board]
    return [Row(words, board.get(key), published) for (key, words), published in known]


def claim_panel(panel: Mapping[str, Any], members: Sequence[Row], name: str) -> Overview:
    """Rows of claims on one axis, in their own unit."""
    labels, rows, units = list[list[str]](), list[dict[str, Any]](), set[str]()
    for place, row in enumerate(members):
        labels.append(wrap(row.words, LABEL))
        if row.line is None:
            continue
        units.add(_unit(row.line.claim)[0])
        rows += _claim_rows(row, row.line, place)
        if row.line.measured:
            labels[-1].append(f"{row.line.measured.count}, {steps_text(row.line.steps)}")
    chart = template(
        "contrasts",
        data=name,
        zero=zero_line(),
        scale={"zero": False} | ({"domain": panel["domain"]} if "domain" in panel else {}),
        axis=[panel["axis"], " or ".join(sorted(units))],
        y=row_axis(labels, [place for place, row in enumerate(members) if row.line is None]),
        height=len(labels) * (13 * max(map(len, labels)) + 6),
    )
    return Overview(Drawing("", chart), {name: columns(rows)}, {}, panel["title"])


def _claim_rows(about: Row, line: Verdict, row: int) -> Iterator[dict[str, Any]]:
    """A claim's figure and the published one, or why there is none."""
    claim, found, (unit, factor) = line.claim, line.measured, _unit(line.claim)
    label = about.words
    nothing = {"mean": math.nan, "low": math.nan, "high": math.nan, "n": 0}
    told = f"{label}\n{claim.id}: {line.verdict}"
    if found is None:
        note = line.verdict if line.verdict == "not testable here" else "waits for its runs"
        yield {"row": row, "source": "ours", **nothing, "note": note, "text": told}
    else:
        value = Estimate(found.value, found.low, found.high, found.n).times(factor)
        ends_of = f"{value.value:+.3g} [{value.low:+.3g}, {value.high:+.3g}] {unit}"
        text = f"{told}\n{ends_of}\n{rests_on(line)}"
        yield {"row": row, "source": "ours", **ends(value), "note": "", "text": text}
    if about.published and claim.published_size is not None:
        said = nothing | {"mean": claim.published_size * factor}
        text = f"{label}\npublished: {claim.published}"
        yield {"row": row, "source": "published", **said, "note": "", "text": text}


def _unit(claim: Claim) -> tuple[str, float]:
    """What a claim's figures are written in, and the number they are multiplied with for it."""
    if claim.transform == "log":
        return "log ratio (−0.1 is −10 %, −0.6 is −45 %)", 1.0
    factor = words_of(claim.terms[0][0]).factor
    return ("points" if factor != 1 else "difference"), factor


def symmetry(comparisons: Sequence[Comparison]) -> Overview | None:
    """Each cell over cosine in every task, by whether its two sides are interchangeable."""
    cells = sorted(
        {c.cell for c in comparisons if c.source == "ours"}, key=lambda cell: (cell != "dot", cell)
    )
    rows = [row for cell in cells for row in _symmetry_rows(comparisons, cell)]
    if not any(row["source"] == "ours" for row in rows):
        return None
    chart = template(
        "contrasts",
        data="symmetry",
        zero=zero_line(),
        scale={"zero": False},
        axis="ln(cell / cosine): left of 0 magnitude hurts, right of it helps",
        y=template("tasks", headings=json.dumps(list(KINDS.values()))),
        height=19 * max(Counter(row["cell"] for row in rows).values()),
    )
    drawing = Drawing(CONTRASTS, chart, {"cell": "cell"})
    title = "Keeping both magnitudes (dot) over discarding them (cosine)"
    return Overview(drawing, {"symmetry": columns(rows)}, {"cell": cells}, title)


def _symmetry_rows(comparisons: Sequence[Comparison], cell: str) -> Iterator[dict[str, Any]]:
    of_cell = [c for c in comparisons if c.cell == cell and c.kind in KINDS]
    chosen, order = _told_apart(_once(of_cell)), 0
    for kind, title in KINDS.items():
        of_kind = [c for c in chosen if c.kind == kind]
        nothing = {"mean": math.nan, "low": math.nan, "high": math.nan, "n": 0}
        if of_kind:
            heading = {"cell": cell, "label": title, "order": order, "source": ""}
            yield heading | nothing | {"note": "", "text": ""}
        for task in dict.fromkeys(c.task for c in of_kind):
            for c in (c for c in of_kind if c.task == task):
                order += 1
                yield {
                    "cell": cell,
                    "label": f"{task} ({_origin(c)})",
                    "order": order,
                    "source": "ours" if c.source == "ours" else "published",
                    "note": "",
                    # An interval of two seeds would take the whole axis.
                    **(ends(c.ratio) if c.ratio.n > 2 else nothing | {"mean": c.ratio.value}),
                    "text": f"{cell} against cosine\n{task}: {c.about}\n{c.metric}, ln ratio "
                    f"{c.ratio.value:+.3f}\n{_origin(c)}",
                }
        order += 1


def squares(comparisons: Sequence[Comparison]) -> Overview | None:
    """The square of cells in every task that was learned, beside published retrieval.

    Of several squares of a task that of trained networks stands here, then that of most seeds.
    """
    found: dict[tuple[str, str], dict[str, Comparison]] = {}
    for c in comparisons:
        published = c.setting == PUBLISHED_ENCODER and c.task.startswith("Query and document")
        if published or (c.source == "ours" and c.task.startswith(SQUARED)):
            found.setdefault((c.task, c.about), {})[c.cell] = c
    best: dict[tuple[str, str], dict[str, Comparison]] = {}
    for cells in found.values():
        learned = not any(c.at_floor for c in cells.values())
        if learned and cells.keys() >= {*SQUARE} - {"cosine"}:
            key = cells["dot"].task, cells["dot"].source
            best[key] = max(best.get(key, {}), cells, key=_weight)
    if all(source != "ours" for _, source in best):
        return None
    rows = [
        row
        for cells in sorted(best.values(), key=lambda cells: _place_of(cells["dot"]))
        for row in _square_rows(cells)
    ]
    lines = {"field": "lines", "type": "nominal"}
    shown = tiles(template("squares_places"), lines)
    chart = template("squares", told=told(names="datum.cell"), tiles=shown)
    caption = "ln(cell / cosine), blue above 0, orange below; [95 % interval over seeds]"
    drawing = Drawing(caption, chart, {"title": "task"}, "title")
    tasks = list(dict.fromkeys(row["title"] for row in rows))
    return Overview(drawing, {"squares": columns(rows)}, {"task": tasks}, "The squares of cells")


def _square_rows(cells: Mapping[str, Comparison]) -> Iterator[dict[str, Any]]:
    title = f"{cells['dot'].task} ({_origin(cells['dot'])})"
    for cell in SQUARE:
        ratio = cells[cell].ratio if cell in cells else Estimate(0.0)
        left, right = (SIDES[g] for g in CORNERS[cell])
        yield {"title": title, "cell": cell, "left": left, "right": right} | ends(ratio)


def _params(overview: Overview) -> list[Chart]:
    return [{"name": name, "value": values[0]} for name, values in overview.controls.items()]


def _place_of(c: Comparison) -> tuple[int, str, str]:
    """Images, image and text, text; a published square stands behind ours of its task."""
    place = next(i for i, start in enumerate(SQUARED) if c.task.startswith(start))
    return place, c.task, "" if c.source == "ours" else c.source


def _once(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Each comparison once: where several studies or parts make it, the one with most seeds."""
    kept: list[Comparison] = []
    for c in sorted(comparisons, key=lambda c: -len(c.runs)):
        if not any(_repeats(c, other) for other in kept):
            kept.append(c)
    return [c for c in comparisons if c in kept]


def _repeats(c: Comparison, other: Comparison) -> bool:
    """Whether the runs are among the other's, or differ only in what else they measured."""
    same = (c.task, c.setting, c.ratio) == (other.task, other.setting, other.ratio)
    return bool(c.runs) and (c.runs <= other.runs or same)


def _told_apart(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Where the setting does not tell two comparisons of a task apart, study and part do."""
    names = Counter((c.source, c.task, c.setting) for c in comparisons)
    return [
        c._replace(setting=c.about) if names[c.source, c.task, c.setting] > 1 else c
        for c in comparisons
    ]


def _weight(cells: Mapping[str, Comparison]) -> tuple[bool, float]:
    """What squares are ranked by: whether trained, then fewest seeds; a published one has none."""
    trained = bool(cells) and all((c.steps or (0, 0))[0] >= TRAINED for c in cells.values())
    return trained, min((c.ratio.n + 0.5 for c in cells.values()), default=0.0)


def _origin(c: Comparison) -> str:
    """Where a comparison comes from, in few words."""
    seeds = f"{c.ratio.n} seed" + "s" * (c.ratio.n != 1)
    origin = seeds if c.source == "ours" else c.source.rpartition(", ")[2]
    floor = "at the floor" if c.at_floor else ""
    return ", ".join(filter(None, [c.setting, origin, steps_text(c.steps), floor]))
