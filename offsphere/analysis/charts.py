"""The charts of one part of a study: each defined once, for the page and for the paper. No torch.

On the page a chart shows what is chosen there (a metric, a setting, ...); in the paper it shows
the part's own metric, with one plot for each setting. charts.yaml has them in Vega-Lite, with holes
for what depends on the part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from offsphere.analysis.chart_data import EFFECTS, controls, datasets
from offsphere.analysis.conditions import all_steps, steps_text
from offsphere.analysis.digest import Study
from offsphere.analysis.panels import Panel, file_name
from offsphere.analysis.words import plain, spoken, words_of
from offsphere.page.charts import Chart, filled, for_page, scales, write_figure
from offsphere.page.looks import Look, look_of
from offsphere.run.progress import track

VARIANCE = "train/negative_variance"
ROW = 20
"""Pixels of a row of marks."""
WIDTH = 250
"""Pixels of one plot of a paper figure."""
ACROSS = 3
HIDDEN = "indexof(hidden, datum.level) < 0"


@dataclass(frozen=True)
class Drawing:
    """A chart, and how the page and the paper choose from its data."""

    caption: str
    chart: Chart
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Columns that have the value of a control of the page, by its name."""
    facet: str | None = None
    """The column that has one plot per value in the paper."""


def page_charts(panel: Panel, found: Mapping[str, Drawing]) -> dict[str, Chart]:
    """The panel's charts as a page's store has them."""
    return {
        kind: for_page(_filtered(drawing.chart, panel, drawing.chosen))
        for kind, drawing in found.items()
    }


def write_figures(study: Study, folder: Path) -> list[Path]:
    """Write every figure that a study's parts have data for; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    parts = track(enumerate(study.panels), len(study.panels), f"Drawing {study.name}", "parts")
    for place, panel in parts:
        if panel.primary is None or panel.treatment is None:
            continue
        data = datasets(panel, [panel.primary, VARIANCE])
        for kind, chart in paper_charts(panel).items():
            written += write_figure(chart, data, folder / f"{file_name(panel, place)}-{kind}")
    return written


def paper_charts(panel: Panel) -> dict[str, Chart]:
    """The figures of a part; what the page shows in several charts stands in one."""
    found = drawings(panel)
    own = spoken(panel.metrics[str(panel.primary)]).name
    over = words_of(next(iter(panel.curves), "")).titled
    names = {"results": own, "square": own, "along": own, "curves": over}
    charts = {
        kind: [_faceted(drawing, panel) for each, drawing in found.items() if each in members]
        for kind, members in PAPER.items()
    }
    after = steps_text(all_steps(panel.steps))
    notes = [f"after {after}"] if after else []
    said = {"along": [*notes, *(f"hollow, dashed: {line.name}" for line in panel.reference)]}
    return {
        kind: {
            "title": {"text": names.get(kind, ""), "subtitle": said.get(kind, notes)},
            "params": _params(panel),
            "hconcat": parts,
        }
        for kind, parts in charts.items()
        if parts
    }


def drawings(panel: Panel) -> dict[str, Drawing]:
    """The charts that a part has data for, by kind."""
    primary = panel.metrics[str(panel.primary)]
    base = _named(panel, panel.baseline or 0)
    found = {
        "values": Drawing("Each seed (ticks), mean and 95 % interval", _values(panel)),
        "differences": Drawing(f"Paired difference to {base}, 95 % interval", _values(panel, "d")),
    }
    setting = {"context": "setting"}
    if primary.squares:
        found["square"] = Drawing("The square: which norm is kept", _square(), setting, "context")
        found["effects"] = Drawing("What discarding a norm changes", _effects(), setting, "context")
    if panel.along is not None:
        found |= _along(panel)
    if panel.curves:
        chosen = {"name": "curve", **setting}
        caption = "Over training, mean and 95 % band"
        found["curves"] = Drawing(caption, _curves(panel), chosen, "context")
    if panel.histograms:
        chosen = {"outcome": "outcome", **setting}
        found["norms"] = Drawing("Norms of the test examples", _norms(panel), chosen, "title")
    if panel.heat_maps:
        chosen = {"metric": "scored", **setting}
        caption = "Trained with one cell, scored with another"
        found["scored"] = Drawing(caption, _scored(panel), chosen, "title")
    return found


PAPER = {
    "results": ("values", "differences"),
    "square": ("square",),
    "along": ("along-value", "along-gain", "along-variance"),
    "curves": ("curves",),
    "norms": ("norms",),
    "scored": ("scored",),
}


def level_looks(panel: Panel) -> list[Look]:
    """The look of each level of a panel."""
    return [look_of(panel.corner(level), level) for level in range(len(panel.levels))]


def whiskers(
    rows: Sequence[str], headings: Sequence[int], looks: Sequence[Chart], prefix: str = ""
) -> list[Chart]:
    """Layers of rows of marks with intervals; `looks` are the colour and the shape channels."""
    y = row_axis(rows, headings)
    return template("whiskers", y=y, colour=looks[0], shape=looks[1], **_ends(prefix))


def row_axis(rows: Sequence[str | Sequence[str]], headings: Sequence[int]) -> Chart:
    """The places of rows by their number, with their names, each in one line or several."""
    names, bold = json.dumps(list(rows)), json.dumps(list(headings))
    return template("rows", names=names, headings=bold, places=list(range(len(rows))))


def zero_line(side: str = "x") -> Chart:
    """Where nothing changes."""
    return template("zero", side=side)


def told(prefix: str = "", names: str = "datum.level") -> Chart:
    """The text of a mark: what it is, mean and interval, seeds."""
    return template("told", prefix=prefix, names=names, form="+.3r" if prefix else ".4r")


def template(name: str, **holes: Any) -> Any:
    """A chart of charts.yaml, or a part of one, with its holes filled."""
    return filled(_templates()[name], holes)


@cache
def _templates() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "templates/charts.yaml").read_text())


def _ends(prefix: str) -> dict[str, str]:
    return {key: f"{prefix}{key}" for key in ("mean", "low", "high")}


def _values(panel: Panel, prefix: str = "") -> Chart:
    """Every condition's mean, or its paired difference to the baseline."""
    rows, headings = [], []
    for context, title in enumerate(panel.contexts):
        if title:
            headings.append(len(rows))
            rows.append(plain(title))
        levels = [c.level for c in panel.conditions if c.context == context]
        rows += [panel.levels[level] for level in levels]
    looks = _looks(panel, legend=False)
    y = row_axis(rows, headings)
    first = zero_line() if prefix else template("seeds", y=y, colour=looks[0])
    return template(
        "values",
        prefix=prefix,
        shown=HIDDEN,
        told=told(prefix),
        layers=[first, *whiskers(rows, headings, looks, prefix)],
        height=ROW * len(rows),
    )


def _square() -> Chart:
    """The four corner cells by which norm is kept."""
    lines = {"field": "lines", "type": "nominal"}
    return template("square", told=told(), tiles=tiles(template("square_places"), lines))


def tiles(places: Chart, text: Chart) -> list[Chart]:
    """Layers of tinted tiles with what they say; the darkest still carries the text."""
    return template("tiles", **places, text=text)


def _effects() -> Chart:
    rows = list(EFFECTS)
    look = ({"value": "var(--ink)"}, {"value": "circle"})
    return template(
        "effects",
        rows=json.dumps(rows),
        told=told(names="datum.effect"),
        zero=zero_line(),
        whiskers=whiskers(rows, [], look),
        height=(ROW + 6) * len(rows),
    )


def _along(panel: Panel) -> dict[str, Drawing]:
    """The metric, its gain and the negatives' variance against the batch size or such."""
    assert panel.along is not None
    factor = plain(panel.along.factor)
    kinds = {"along-value": (f"Against {factor}, 95 % interval", "metric", "")}
    if not panel.along.of_levels:
        kinds["along-gain"] = (f"Gain against {factor}, paired, 95 % interval", "metric", "d")
    if VARIANCE in panel.metrics:
        title = f"Variance of negative similarities against {factor}"
        kinds["along-variance"] = (title, json.dumps(VARIANCE), "")
    return {
        kind: Drawing(
            caption, _along_chart(panel, metric, prefix, kind), {"group": "group"}, "group"
        )
        for kind, (caption, metric, prefix) in kinds.items()
    }


def _along_chart(panel: Panel, metric: str, prefix: str, kind: str) -> Chart:
    assert panel.along is not None
    numbers = sorted({number for _, members in panel.along.groups for number, _ in members})
    looks = _looks(panel, legend=True)
    if panel.along.of_levels:
        looks = ({"value": "var(--ink)"}, {"value": "circle"})
    title = {"title": plain(panel.along.factor), "labelAngle": 0}
    names = [f"{n:g}" for n in numbers]
    x = {"field": "number", "type": "ordinal", "sort": names, "axis": title}
    marks = {"x": x, "colour": looks[0], "shape": looks[1], **_ends(prefix)}
    has_reference = kind == "along-variance" and panel.reference
    return template(
        "along",
        **marks,
        metric=metric,
        shown=HIDDEN,
        told=told(prefix, f"datum.level + ', {plain(panel.along.factor)} ' + datum.number"),
        zero=[zero_line("y")] if prefix else [],
        reference=[template("reference", **marks, numbers=json.dumps(names))]
        if has_reference
        else [],
    )


def _curves(panel: Panel) -> Chart:
    over = "samples seen" if panel.curves_over == "samples" else "step"
    names = f"datum.level + ', {over} ' + format(datum.x, ',')"
    colour, _ = _looks(panel, legend=True)
    return template("curves", shown=HIDDEN, told=told(names=names), over=over, colour=colour)


def _norms(panel: Panel) -> Chart:
    wide = any(found.logarithmic for found in panel.histograms)
    positive = all(found.edges[0] > 0 for found in panel.histograms)
    scale = {"type": "log"} if wide and positive else {"zero": False}
    colour, _ = _looks(panel, legend=True)
    return template("norms", shown=HIDDEN, scale={**scale, "nice": False}, colour=colour)


def _scored(panel: Panel) -> Chart:
    number = {"field": "mean", "type": "quantitative", "format": ".3r"}
    names = "'trained with ' + datum.trained + ', scored with ' + datum.scored"
    return template(
        "scored",
        told=told(names=names),
        tiles=tiles(template("scored_places"), number),
        height=34 * len(panel.levels),
    )


def _filtered(chart: Chart, panel: Panel, chosen: Mapping[str, str]) -> Chart:
    """The chart with what is chosen on the page."""
    filters = [{"filter": f"datum.{column} === {signal}"} for column, signal in chosen.items()]
    return {**chart, "transform": [*filters, *chart["transform"]], "params": _params(panel)}


def _faceted(drawing: Drawing, panel: Panel) -> Chart:
    """The chart with one plot for each value of a column; a part of a paper figure."""
    fixed = {"name": "curve"} if drawing.facet == "context" and "name" in drawing.chosen else {}
    chart = {**drawing.chart, "width": WIDTH}
    filters = [{"filter": f"datum.{column} === {signal}"} for column, signal in fixed.items()]
    chart["transform"] = [*filters, *chart["transform"]]
    if drawing.facet is None or (drawing.facet == "context" and not any(panel.contexts)):
        return {**chart, "title": drawing.caption}
    inside = {key: chart.pop(key) for key in ("layer", "height", "width")}
    titles = datasets(panel, [])[chart["data"]["name"]].get("title", [])
    groups = [name for name, _ in panel.along.groups] if panel.along else []
    order = {"context": panel.contexts, "group": groups, "title": list(dict.fromkeys(titles))}
    if drawing.facet == "group" and not any(name for name, _ in panel.along.groups):  # pyright: ignore
        return {**chart, **inside, "title": drawing.caption}
    return {
        **chart,
        "title": drawing.caption,
        "facet": {"field": drawing.facet, "type": "nominal", "sort": order[drawing.facet]},
        "columns": ACROSS,
        "spec": inside,
        "resolve": {"scale": {"x": "independent", "y": "independent"}},
    }


def _params(panel: Panel) -> list[Chart]:
    first = {name: found[0][0] if found else "" for name, found in controls(panel).items()}
    values = {**first, "metric": panel.primary, "hidden": []}
    return [{"name": name, "value": value} for name, value in values.items()]


def _looks(panel: Panel, *, legend: bool) -> tuple[Chart, Chart]:
    """The colour and the shape channels of a panel's levels."""
    colours, shapes = scales(panel.levels, level_looks(panel))
    shown = {} if legend else {"legend": None}
    level = {"field": "level", "type": "nominal", **shown}
    return {**level, "scale": colours}, {**level, "scale": shapes}


def _named(panel: Panel, level: int) -> str:
    name = panel.levels[level]
    return name if panel.treatment in ("cell", "arm") else f"{plain(str(panel.treatment))} {name}"
