"""The charts of one part of a study: each defined once, for the page and for the paper. No torch.

On the page a chart shows what is chosen there (a metric, a setting, ...); in the paper it shows
the part's own metric, with one plot for each setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offsphere.analysis.chart_data import EFFECTS, controls, datasets
from offsphere.analysis.conditions import all_steps, steps_text
from offsphere.analysis.digest import Study
from offsphere.analysis.panels import Panel, file_name
from offsphere.analysis.words import plain, spoken, words_of
from offsphere.page.charts import Chart, for_page, scales, write_figure
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
    mean, low, high = (f"{prefix}{key}" for key in ("mean", "low", "high"))
    y = row_axis(rows, headings)
    ends = {"x": number_axis(low), "x2": {"field": high}, "y": y, "color": looks[0]}
    text = {"field": "text", "type": "nominal"}
    return [
        {"mark": {"type": "rule", "strokeWidth": 2, "aria": False}, "encoding": ends},
        {
            "mark": {"type": "point"},
            "encoding": {
                "x": number_axis(mean),
                "y": y,
                "color": looks[0],
                "shape": looks[1],
                "description": text,
                "tooltip": text,
            },
        },
    ]


def row_axis(rows: Sequence[str], headings: Sequence[int]) -> Chart:
    """The places of rows by their number, with their names; headings are bold."""
    bold = {"test": f"indexof({json.dumps(list(headings))}, datum.value) >= 0", "value": 700}
    axis = {
        "title": None,
        "labelExpr": f"{json.dumps(list(rows))}[datum.value]",
        "labelColor": "var(--ink)",
        "labelFontWeight": {"condition": bold, "value": 400},
        "domain": False,
        "ticks": False,
        "grid": False,
        "values": list(range(len(rows))),
    }
    scale = {"domain": list(range(len(rows)))}
    return {"field": "row", "type": "ordinal", "axis": axis, "scale": scale}


def zero_line(side: str = "x") -> Chart:
    """Where nothing changes."""
    mark = {"type": "rule", "strokeDash": [3, 3], "aria": False}
    return {"data": {"values": [{}]}, "mark": mark, "encoding": {side: {"datum": 0}}}


def told(prefix: str = "", names: str = "datum.level") -> Chart:
    """The text of a mark: what it is, mean and interval, seeds."""
    form = "'+.3r'" if prefix else "'.4r'"
    mean, low, high = (f"format(datum.{prefix}{key}, {form})" for key in ("mean", "low", "high"))
    both = f"isValid(datum.{prefix}low) ? ' [' + {low} + ', ' + {high} + ']' : ''"
    seeds = f"datum.{prefix}n + (datum.{prefix}n == 1 ? ' seed' : ' seeds')"
    return {
        "calculate": f"{names} + (datum.context ? ', ' + datum.context : '') + '\\n' + {mean} + "
        f"({both}) + '\\n' + {seeds}",
        "as": "text",
    }


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
    layers = whiskers(rows, headings, looks, prefix)
    if prefix:
        layers.insert(0, zero_line())
    else:
        tick = {"type": "tick", "yOffset": 7, "size": 6, "opacity": 0.6, "aria": False}
        seeds = {"x": number_axis("seed"), "y": row_axis(rows, headings), "color": looks[0]}
        flat = [{"flatten": ["seeds"], "as": ["seed"]}]
        layers.insert(0, {"transform": flat, "mark": tick, "encoding": seeds})
    there = f"datum.metric === metric && isValid(datum.{prefix}mean) && {HIDDEN}"
    return {
        "data": {"name": "conditions"},
        "transform": [{"filter": there}, told(prefix)],
        "layer": layers,
        "height": ROW * len(rows),
    }


def _square() -> Chart:
    """The four corner cells by which norm is kept."""
    sides = {"type": "nominal", "sort": ["discarded", "kept"]}
    axis = {"domain": False, "ticks": False, "labelAngle": 0}
    places = {
        "x": {"field": "right", "axis": {**axis, "title": "right norm", "orient": "top"}, **sides},
        "y": {"field": "left", "axis": {**axis, "title": "left norm"}, **sides},
    }
    ends = "'[' + format(datum.low, '.4r') + ', ' + format(datum.high, '.4r') + ']'"
    shown = ["datum.level", "format(datum.mean, '.4r')", f"isValid(datum.low) ? {ends} : ''"]
    return {
        "data": {"name": "conditions"},
        "transform": [
            {"filter": "datum.metric === metric && isValid(datum.left) && isValid(datum.mean)"},
            {"calculate": f"[{', '.join(shown)}]", "as": "lines"},
            told(),
        ],
        "layer": tiles(places, {"field": "lines", "type": "nominal"}),
        "height": 190,
    }


def tiles(places: Chart, text: Chart) -> list[Chart]:
    """Layers of tinted tiles with what they say; the darkest still carries the text."""
    tint = {"range": [0.05, 0.35], "zero": False}
    tone = {"field": "mean", "type": "quantitative", "scale": tint, "legend": None}
    said = {"field": "text", "type": "nominal"}
    marks = {"opacity": tone, "description": said, "tooltip": said}
    return [
        {"mark": {"type": "rect", "color": "var(--heat)"}, "encoding": {**places, **marks}},
        {
            "mark": {"type": "text", "fontSize": 11, "lineHeight": 14, "aria": False},
            "encoding": {**places, "text": text},
        },
    ]


def _effects() -> Chart:
    rows = list(EFFECTS)
    look = {"value": "var(--ink)"}
    place = {"calculate": f"indexof({json.dumps(rows)}, datum.effect)", "as": "row"}
    return {
        "data": {"name": "effects"},
        "transform": [
            {"filter": "datum.metric === metric && isValid(datum.mean)"},
            place,
            told(names="datum.effect"),
        ],
        "layer": [zero_line(), *whiskers(rows, [], (look, {"value": "circle"}))],
        "height": (ROW + 6) * len(rows),
    }


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
    mean, low, high = (f"{prefix}{key}" for key in ("mean", "low", "high"))
    title = {"title": plain(panel.along.factor), "labelAngle": 0}
    x = {"field": "number", "type": "ordinal", "sort": [f"{n:g}" for n in numbers], "axis": title}
    text = {"field": "text", "type": "nominal"}
    y = number_axis(mean)
    line = {"x": x, "y": y, "color": looks[0]}
    layers: list[Chart] = [
        {"mark": {"type": "line", "strokeWidth": 1.4, "aria": False}, "encoding": line},
        {
            "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
            "encoding": {"x": x, "y": number_axis(low), "y2": {"field": high}, "color": looks[0]},
        },
        {
            "mark": {"type": "point"},
            "encoding": {**line, "shape": looks[1], "description": text, "tooltip": text},
        },
    ]
    if prefix:
        layers.insert(0, zero_line("y"))
    if kind == "along-variance" and panel.reference:
        said = {"calculate": "datum.name + '\\n' + datum.number + ': ' + datum.mean", "as": "text"}
        seen = f"indexof({json.dumps([f'{n:g}' for n in numbers])}, datum.number) >= 0"
        mark = {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1, "aria": False}
        hollow = {"type": "point", "filled": False, "fill": "var(--paper)"}
        points = {**line, "shape": looks[1], "description": text, "tooltip": text}
        layers.append(
            {
                "data": {"name": "reference"},
                "transform": [{"filter": seen}, said],
                "layer": [{"mark": mark, "encoding": line}, {"mark": hollow, "encoding": points}],
            }
        )
    there = f"datum.metric === {metric} && isValid(datum.{mean}) && isValid(datum.number)"
    name = f"datum.level + ', {plain(panel.along.factor)} ' + datum.number"
    return {
        "data": {"name": "conditions"},
        "transform": [{"filter": f"{there} && {HIDDEN}"}, told(prefix, name)],
        "layer": layers,
        "height": 210,
    }


def _curves(panel: Panel) -> Chart:
    over = "samples seen" if panel.curves_over == "samples" else "step"
    x = {"field": "x", "type": "quantitative", "axis": {"title": over, "grid": False}}
    colour, _ = _looks(panel, legend=True)
    text = {"field": "text", "type": "nominal"}
    band = {"x": x, "y": number_axis("low"), "y2": {"field": "high"}, "color": colour}
    line = {"x": x, "y": number_axis("mean"), "color": colour}
    return {
        "data": {"name": "curves"},
        "transform": [
            {"filter": HIDDEN},
            told(names=f"datum.level + ', {over} ' + format(datum.x, ',')"),
        ],
        "layer": [
            {"mark": {"type": "area", "opacity": 0.15, "aria": False}, "encoding": band},
            {"mark": {"type": "line", "strokeWidth": 1.8, "aria": False}, "encoding": line},
            {
                "mark": {"type": "point", "size": 16},
                "encoding": {**line, "description": text, "tooltip": text},
            },
        ],
        "height": 230,
    }


def _norms(panel: Panel) -> Chart:
    wide = any(found.logarithmic for found in panel.histograms)
    positive = all(found.edges[0] > 0 for found in panel.histograms)
    scale = {"type": "log"} if wide and positive else {"zero": False}
    axis = {"title": "norm", "grid": False}
    said = "datum.level + ', norm ' + format(datum.x, '.3r') + ': ' + format(datum.share, '.1%')"
    text = {"field": "text", "type": "nominal"}
    colour, _ = _looks(panel, legend=True)
    line = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "scale": {**scale, "nice": False},
            "axis": axis,
        },
        "y": {"field": "share", "type": "quantitative", "axis": {"title": "share of examples"}},
        "color": colour,
    }
    return {
        "data": {"name": "norms"},
        "transform": [{"filter": HIDDEN}, {"calculate": said, "as": "text"}],
        "layer": [
            {
                "mark": {"type": "line", "interpolate": "step-after", "aria": False},
                "encoding": line,
            },
            {
                "mark": {"type": "point", "size": 30, "opacity": 0},
                "encoding": {**line, "tooltip": text, "description": text},
            },
        ],
        "height": 210,
    }


def _scored(panel: Panel) -> Chart:
    axis = {"domain": False, "ticks": False, "labelAngle": 0, "labelLimit": 120}
    places = {
        "x": {"field": "scored", "type": "nominal", "sort": None},
        "y": {"field": "trained", "type": "nominal", "sort": None},
    }
    places["x"]["axis"] = {**axis, "title": "scored with", "orient": "top"}
    places["y"]["axis"] = {**axis, "title": "trained with"}
    number = {"field": "mean", "type": "quantitative", "format": ".3r"}
    names = "'trained with ' + datum.trained + ', scored with ' + datum.scored"
    return {
        "data": {"name": "scored"},
        "transform": [{"filter": "isValid(datum.mean)"}, told(names=names)],
        "layer": tiles(places, number),
        "height": 34 * len(panel.levels),
    }


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


def number_axis(name: str) -> Chart:
    scale = {"zero": False}
    return {"field": name, "type": "quantitative", "scale": scale, "axis": {"title": None}}


def _named(panel: Panel, level: int) -> str:
    name = panel.levels[level]
    return name if panel.treatment in ("cell", "arm") else f"{plain(str(panel.treatment))} {name}"
