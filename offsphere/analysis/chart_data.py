"""What the charts of one part of a study are drawn from: tidy columns, in words and points.

Every chart of a part reads the same few tables, so a page carries them once. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from offsphere.analysis.panels import Panel
from offsphere.analysis.readings import Metric
from offsphere.analysis.words import plain, spoken, words_of
from offsphere.estimate import Estimate
from offsphere.names import CORNERS, SQUARE
from offsphere.page.charts import Columns, columns

EFFECTS = ("left norm discarded", "right norm discarded", "interaction")
SIDES = {1.0: "discarded", 0.0: "kept"}
"""What an exponent does to a side's norm."""
CURVE_DIGITS = 3
"""Digits of a curve's points: enough for a screen, because curves are most of a page's size."""


def controls(panel: Panel) -> dict[str, list[tuple[str, str]]]:
    """What can be chosen on the page, (value, words) of each; the first is drawn in the paper."""
    groups = [] if panel.along is None else [name for name, _ in panel.along.groups]
    scored = dict.fromkeys(found.metric for found in panel.heat_maps)
    return {
        "metric": [(name, words_of(name).titled) for name in panel.metrics],
        "setting": [(name, plain(name)) for name in panel.contexts],
        "group": [(name, plain(name)) for name in groups],
        "curve": [(name, words_of(name).titled) for name in panel.curves],
        "outcome": [(x, plain(x)) for x in dict.fromkeys(h.outcome for h in panel.histograms)],
        "scored": [(name, words_of(name).titled) for name in scored],
    }


def datasets(panel: Panel, metrics: Sequence[str] | None = None) -> dict[str, Columns]:
    """What the charts of a panel are drawn from, of all metrics or of some."""
    chosen = [x for x in panel.metrics if metrics is None or x in metrics]
    found = [(name, spoken(panel.metrics[name])) for name in chosen]
    first = controls(panel)["curve"][:1]
    curves = [name for name, _ in first] if metrics is not None else list(panel.curves)
    return {
        "conditions": columns(row for name, metric in found for row in _rows(panel, name, metric)),
        "effects": columns(
            {"metric": name, "context": panel.contexts[context], "effect": what, **ends(x)}
            for name, metric in found
            for context, square in metric.squares.items()
            for what, x in zip(EFFECTS, square, strict=True)
        ),
        "curves": columns(
            (row for name in curves for row in _curve_rows(panel, name)), CURVE_DIGITS
        ),
        "norms": columns(_norm_rows(panel)),
        "scored": columns(_scored_rows(panel)),
        "reference": columns(
            {"level": line.level, "number": f"{x:g}", "mean": y, "name": line.name}
            for line in panel.reference
            if line.level in panel.levels
            for x, y in line.points
        ),
    }


def _rows(panel: Panel, name: str, metric: Metric) -> Iterator[dict[str, Any]]:
    factor, rows, along = words_of(name).factor, _row_places(panel), _numbers(panel)
    for place, condition in enumerate(panel.conditions):
        difference = metric.difference[place]
        cell = panel.corner(condition.level)
        sides = [SIDES[g] for g in CORNERS[cell]] if cell in SQUARE else [None, None]
        group, number = along.get(place, (None, None))
        yield {
            "metric": name,
            "row": rows[place],
            "context": panel.contexts[condition.context],
            "level": panel.levels[condition.level],
            **ends(metric.summary[place]),
            "seeds": [x * factor for x in metric.values[place] if math.isfinite(x)],
            **{f"d{key}": x for key, x in (ends(difference) if difference else {}).items()},
            **({"left": sides[0], "right": sides[1]} if cell else {}),
            **({"group": group, "number": number} if panel.along else {}),
        }


def _row_places(panel: Panel) -> dict[int, int]:
    """The row of each condition: a heading stands above those of a named context."""
    rows, row = {}, 0
    for context, title in enumerate(panel.contexts):
        row += bool(title)
        for place, condition in enumerate(panel.conditions):
            if condition.context == context:
                rows[place], row = row, row + 1
    return rows


def _numbers(panel: Panel) -> dict[int, tuple[str, str]]:
    """(group, number) of the conditions that are drawn against a number."""
    if panel.along is None:
        return {}
    found = {}
    for group, (name, members) in enumerate(panel.along.groups):
        for number, member in members:
            for level in range(len(panel.levels)):
                pair = (group, member) if panel.along.of_levels else (member, level)
                if (place := panel.condition(*pair)) is not None:
                    found[place] = (name, f"{number:g}")
    return found


def _curve_rows(panel: Panel, name: str) -> Iterator[dict[str, Any]]:
    factor = words_of(name).factor
    for line in panel.curves[name]:
        condition = panel.conditions[line.condition]
        for x, point in zip(line.x, line.points, strict=True):
            where = panel.contexts[condition.context], panel.levels[condition.level]
            yield {"name": name, "context": where[0], "level": where[1], "x": x} | ends(
                point.times(factor)
            )


def _norm_rows(panel: Panel) -> Iterator[dict[str, Any]]:
    for found in panel.histograms:
        context = panel.contexts[found.context]
        title = ", ".join(plain(x) for x in (found.outcome, context) if x)
        for level, shares in found.shares.items():
            for edge, share in zip(found.edges, [*shares, shares[-1]], strict=True):
                row = {"outcome": found.outcome, "context": context, "title": title}
                yield row | {"level": panel.levels[level], "x": edge, "share": share}


def _scored_rows(panel: Panel) -> Iterator[dict[str, Any]]:
    for found in panel.heat_maps:
        words, context = words_of(found.metric), panel.contexts[found.context]
        title = ", ".join(x for x in (words.titled, plain(context)) if x)
        for level, row in found.rows.items():
            for group, x in zip(found.columns, row, strict=True):
                names = {"metric": found.metric, "context": context, "title": title}
                cells = {"trained": panel.levels[level], "scored": " = ".join(group)}
                yield names | cells | ends(x.times(words.factor))


def ends(found: Estimate) -> dict[str, Any]:
    return {"mean": found.value, "low": found.low, "high": found.high, "n": found.n}
