"""The charts of the whole answer: verdicts, symmetry, the variance term, the squares of cells.

No torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from offsphere.analysis.claims import Verdict
from offsphere.analysis.conditions import all_steps, steps_text
from offsphere.analysis.digest import Comparison, Study
from offsphere.analysis.panels import Panel
from offsphere.analysis.words import words_of
from offsphere.estimate import Estimate
from offsphere.names import CORNERS, SQUARE
from offsphere.page.charts import Chart, Columns, columns, drawn, write_figure

KINDS = {"asymmetric": "different roles", "symmetric": "interchangeable", "control": "control"}
PUBLISHED_ENCODER = "contriever"
SPREAD = "train/negative_variance"
SQUARED = ("Two views of an image", "Image and text", "Query and document", "Two halves")
FARTHEST = 2.0
"""Margins at which the axis of the verdicts ends."""


@dataclass(frozen=True)
class Overview:
    """A chart over several studies with its data and what can be chosen in it."""

    drawing: Drawing
    data: Mapping[str, Columns]
    controls: Mapping[str, Sequence[str]]
    title: str


def write_overview(found: Mapping[str, Overview], lines: Sequence[Verdict], folder: Path) -> None:
    """Write the charts that there are data for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, overview in found.items():
        write_figure(paper_chart(overview), overview.data, folder / name)
    if measured := [line for line in lines if line.measured and line.claim.kind == "primary"]:
        chart, data = forest(measured)
        write_figure(chart, data, folder / "verdicts")


def overviews(studies: Sequence[Study], comparisons: Sequence[Comparison]) -> dict[str, Overview]:
    """The charts over all studies, by name."""
    found = {
        "symmetry": symmetry(comparisons),
        "variance": variance(studies),
        "squares": squares(comparisons),
    }
    return {name: overview for name, overview in found.items() if overview is not None}


def page_chart(overview: Overview) -> Chart:
    """The chart with what is chosen on the page."""
    drawing = overview.drawing
    filters = [{"filter": f"datum.{name} === {by}"} for name, by in drawing.chosen.items()]
    transform = [*filters, *drawing.chart["transform"]]
    return {**drawing.chart, "transform": transform, "params": _params(overview)}


def paper_chart(overview: Overview) -> Chart:
    """The chart with its first choice, or with one plot for each."""
    drawing, title = (
        overview.drawing,
        {"text": overview.title, "subtitle": overview.drawing.caption},
    )
    if drawing.facet is None:
        return {**page_chart(overview), "width": 2 * WIDTH, "title": title}
    chart = {**drawing.chart, "params": _params(overview), "title": title}
    inside = {key: chart.pop(key) for key in ("layer", "height")}
    order = next(iter(overview.controls.values()))
    facet = {"field": drawing.facet, "type": "nominal", "sort": list(order)}
    split = {"facet": facet, "columns": 4, "spec": {**inside, "width": 0.7 * WIDTH}}
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
    scaled = ends(Estimate(found.value, found.low, found.high, found.n).times(1 / (unit or 1.0)))
    return {"row": row, **scaled, "text": f"{line.claim.id}: {line.verdict}"}


def symmetry(comparisons: Sequence[Comparison]) -> Overview | None:
    """Each cell over cosine in every task, by whether its two sides are interchangeable."""
    cells = sorted(
        {c.cell for c in comparisons if c.source == "ours"}, key=lambda cell: (cell != "dot", cell)
    )
    rows = [row for cell in cells for row in _symmetry_rows(comparisons, cell)]
    if not any(row["source"] == "ours" for row in rows):
        return None
    chart = template(
        "symmetry",
        zero=zero_line(),
        headings=json.dumps(list(KINDS.values())),
        height=19 * max(Counter(row["cell"] for row in rows).values()),
    )
    caption = "filled: ours, with 95 % intervals; hollow: published, without"
    drawing = Drawing(caption, chart, {"cell": "cell"})
    title = "Keeping both magnitudes (dot) over discarding them (cosine)"
    return Overview(drawing, {"symmetry": columns(rows)}, {"cell": cells}, title)


def _symmetry_rows(comparisons: Sequence[Comparison], cell: str) -> Iterator[dict[str, Any]]:
    of_cell = [c for c in comparisons if c.cell == cell and c.kind in KINDS]
    chosen, order = _told_apart(_once(of_cell)), 0
    for kind, title in KINDS.items():
        of_kind = [c for c in chosen if c.kind == kind]
        nothing = {"mean": math.nan, "low": math.nan, "high": math.nan, "n": 0}
        if of_kind:
            heading = {"cell": cell, "label": title, "order": order, "source": "", "text": ""}
            yield heading | nothing
        for task in dict.fromkeys(c.task for c in of_kind):
            for c in (c for c in of_kind if c.task == task):
                order += 1
                yield {
                    "cell": cell,
                    "label": f"{task} ({_origin(c)})",
                    "order": order,
                    "source": "ours" if c.source == "ours" else "published",
                    # An interval of two seeds would take the whole axis.
                    **(ends(c.ratio) if c.ratio.n > 2 else nothing | {"mean": c.ratio.value}),
                    "text": f"{cell} against cosine\n{task}: {c.where}\n{c.metric}, ln ratio "
                    f"{c.ratio.value:+.3f}\n{_origin(c)}",
                }
        order += 1


def variance(studies: Sequence[Study]) -> Overview | None:
    """What the variance term gains, and what it does to the negatives, by batch size."""
    panels = [p for s in studies for p in s.panels if _by_batch_size(p)]
    if not panels:
        return None
    first = panels[0]
    words = words_of(str(first.primary))
    counts, rows = set[int](), []
    gain = f"gain in {words.text}{words.unit and ','}{words.unit}"
    for name in first.levels:
        for x in sorted(_contexts(first)):
            for panel, at in _most_seeds(panels, name, x):
                row = {"level": f"weight {name}", "number": f"{x:g}"}
                change, spread = panel.metrics[str(panel.primary)], panel.metrics.get(SPREAD)
                if (found := change.difference[at]) is not None:
                    counts.add(found.n)
                    rows.append({**row, "plot": gain} | ends(found.times(words.scale)))
                if spread is not None:
                    rows.append({**row, "plot": "variance of negatives"} | ends(spread.summary[at]))
    seeds = " to ".join(str(n) for n in sorted({min(counts), max(counts)})) if counts else "no"
    steps = steps_text(all_steps(step for panel in panels for step in panel.steps))
    sizes = [f"{x:g}" for x in sorted(_contexts(first))]
    names = "datum.plot + ', ' + datum.level + ', batch size ' + datum.number"
    chart = template("variance", told=told(names=names), sizes=sizes)
    caption = f"{seeds} seeds" + (f", {steps}" if steps else "")
    plots = list(dict.fromkeys(row["plot"] for row in rows))
    drawing = Drawing(caption, chart, {"plot": "plot"}, "plot")
    title = "What the variance term gains, and what it does to the negatives"
    return Overview(drawing, {"variance": columns(rows)}, {"plot": plots}, title)


def squares(comparisons: Sequence[Comparison]) -> Overview | None:
    """The square of cells in every task, from its most seeds, beside published retrieval."""
    found: dict[tuple[str, str], dict[str, Comparison]] = {}
    for c in comparisons:
        published = c.setting == PUBLISHED_ENCODER and c.task.startswith("Query and document")
        if published or (c.source == "ours" and c.task.startswith(SQUARED)):
            found.setdefault((c.task, c.where), {})[c.cell] = c
    best: dict[tuple[str, str], dict[str, Comparison]] = {}
    for cells in found.values():
        if cells.keys() >= {*SQUARE} - {"cosine"}:
            key = cells["dot"].task, cells["dot"].source
            best[key] = max(best.get(key, {}), cells, key=_seeds)
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
    caption = "ln(cell / cosine); [95 % interval over seeds]"
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
    """What several studies or parts compare stands once, with the most seeds."""
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
        c._replace(setting=c.where) if names[c.source, c.task, c.setting] > 1 else c
        for c in comparisons
    ]


def _most_seeds(panels: Sequence[Panel], level: str, number: float) -> list[tuple[Panel, int]]:
    """The first panel's condition, or the one of another part that repeats it with more runs."""
    best: list[tuple[Panel, int]] = []
    for panel in panels:
        context = _contexts(panel).get(number)
        if context is None or level not in panel.levels:
            continue
        at = panel.condition(context, panel.levels.index(level))
        if at is not None and all(_runs(*place) < _runs(panel, at) for place in best):
            best = [(panel, at)]
    return best


def _contexts(panel: Panel) -> dict[float, int]:
    return dict(panel.along.groups[0][1]) if panel.along else {}


def _runs(panel: Panel, place: int) -> set[str]:
    return set(panel.conditions[place].runs)


def _seeds(cells: Mapping[str, Comparison]) -> float:
    """The fewest seeds of a square's cells; a published square counts as more than none."""
    return min((c.ratio.n + 0.5 for c in cells.values()), default=0.0)


def _origin(c: Comparison) -> str:
    """Where a comparison comes from, in few words."""
    seeds = f"{c.ratio.n} seed" + "s" * (c.ratio.n != 1)
    origin = seeds if c.source == "ours" else c.source.rpartition(", ")[2]
    floor = "at the floor" if c.at_floor else ""
    return ", ".join(filter(None, [c.setting, origin, steps_text(c.steps), floor]))


def _by_batch_size(panel: Panel) -> bool:
    along = panel.along
    return (
        along is not None
        and not along.of_levels
        and along.factor == "batch_size"
        and panel.treatment == "variance_weight"
        and panel.primary is not None
    )
