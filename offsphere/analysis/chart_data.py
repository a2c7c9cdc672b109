"""The data that the page's script draws its charts from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offsphere.analysis.digest import Comparison
from offsphere.analysis.markup import Html, shortened
from offsphere.analysis.panels import Metric, Panel, Square
from offsphere.estimate import Estimate
from offsphere.names import CELLS

SHAPES = ("circle", "triangle", "wedge", "square", "diamond")
MARKERS = {"triangle-up": "triangle", "triangle-down": "wedge", "cross": "diamond"} | {
    name: name for name in ("circle", "square", "diamond")
}


def panel_data(panel: Panel) -> dict[str, Any]:
    """What the charts of a panel are drawn from."""
    return {
        "treatment": panel.treatment,
        "levels": panel.levels,
        "styles": level_styles(panel),
        "baseline": panel.baseline,
        "contexts": panel.contexts,
        "conditions": [[condition.context, condition.level] for condition in panel.conditions],
        "seeds": panel.seeds,
        "primary": panel.primary,
        "metrics": {name: _metric_data(metric) for name, metric in panel.metrics.items()},
        "curves": {
            name: [
                {"condition": line.condition, "x": all_short(line.x), **_columns(line.points)}
                for line in lines
            ]
            for name, lines in panel.curves.items()
        },
        "over": panel.curves_over,
        "histograms": [
            {
                "outcome": found.outcome,
                "context": found.context,
                "edges": all_short(found.edges),
                "shares": {str(level): all_short(x) for level, x in found.shares.items()},
                "log": found.logarithmic,
                "cv": {str(level): short(x) for level, x in found.variation.items()},
            }
            for found in panel.histograms
        ],
        "reference": [
            {
                "name": line.name,
                "level": line.level,
                "x": [x for x, _ in line.points],
                "y": [y for _, y in line.points],
            }
            for line in panel.reference
        ],
        "along": None
        if panel.along is None
        else {
            "factor": panel.along.factor,
            "groups": [{"name": name, "members": m} for name, m in panel.along.groups],
            "ofLevels": panel.along.of_levels,
        },
    }


def level_styles(panel: Panel) -> list[dict[str, str]]:
    """The colour and shape of each level: a cell has the same ones everywhere."""
    styles = []
    for level in range(len(panel.levels)):
        corner = panel.corner(level)
        if corner in CELLS:
            row = CELLS[corner]
            colour = f"light-dark({row.colour}, {row.dark})"
            styles.append({"colour": colour, "shape": MARKERS[row.marker]})
        else:
            colour = f"var(--level-{level % 8})"
            styles.append({"colour": colour, "shape": SHAPES[level % len(SHAPES)]})
    return styles


def comparison_data(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """What the chart of all tasks is drawn from."""
    return [
        {
            "kind": found.kind,
            "task": found.task,
            "where": found.where,
            "source": found.source,
            "metric": found.metric,
            "cell": found.cell,
            **{key: column[0] for key, column in _columns([found.ratio]).items()},
            "n": found.ratio.n,
        }
        for found in comparisons
    ]


def embedded(data: Mapping[str, Any]) -> Html:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(text)


def short(value: float | None) -> float | None:
    """A number as the page carries it; None where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = shortened(value)
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def all_short(values: Iterable[float]) -> list[float | None]:
    """`short` of each."""
    return [short(value) for value in values]


def _metric_data(metric: Metric) -> dict[str, Any]:
    empty = Estimate(math.nan, math.nan, math.nan, 0)
    return {
        "decimals": metric.decimals,
        **_columns(metric.summary),
        "n": [found.n for found in metric.summary],
        "missing": metric.missing,
        "values": [all_short(values) for values in metric.values],
        "difference": {
            **_columns([found or empty for found in metric.difference]),
            "n": [found.n if found else 0 for found in metric.difference],
        },
        "effect": [short(x) for x in metric.effect_size],
        "smallest": [short(x) for x in metric.smallest],
        "crossed": None
        if metric.crossed is None
        else [[short(x.low), short(x.high)] if x else [None, None] for x in metric.crossed],
        "squares": {
            str(context): {
                name: [short(effect.value), short(effect.low), short(effect.high), effect.n]
                for name, effect in zip(Square._fields, square, strict=True)
            }
            for context, square in metric.squares.items()
        },
    }


def _columns(found: Sequence[Estimate]) -> dict[str, list[float | None]]:
    columns = {"mean": "value", "low": "low", "high": "high"}
    return {key: [short(getattr(x, name)) for x in found] for key, name in columns.items()}
