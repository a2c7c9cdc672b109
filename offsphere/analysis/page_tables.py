"""The tables of the page as rows of strings, so that one template draws them all. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offsphere.analysis.conditions import Steps, steps_text
from offsphere.analysis.digest import Comparison, Study
from offsphere.analysis.panels import Panel
from offsphere.analysis.readings import Metric
from offsphere.analysis.words import plain, spoken, words_of
from offsphere.page.numbers import interval, number, plain_number

TOGETHER = ("test/probe", "test/knn", "test/probe_embedding", "test/knn_embedding")
ABOUT_RESULTS = (
    "Means over seeds with t-intervals; differences are paired by seed. Effect size: mean "
    "difference over its standard deviation (Hedges' correction). Seen from: the smallest true "
    "difference that these seeds show with 80 % power. {crossed}All columns are in runs.csv."
)


class Row(NamedTuple):
    """The first cell names the row; a heading has no other."""

    cells: list[str]
    level: str | None = None


@dataclass(frozen=True)
class Table:
    """A table with a title or a caption above it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    name: str = ""
    """What stands in bold before the caption: the metric that is shown."""
    numbers_from: int = 99
    """The first column of numbers."""


def results_table(panel: Panel, name: str) -> Table:
    """Every condition's numbers for one metric; for every metric as many rows and columns."""
    metric = spoken(panel.metrics[name])
    base = level_name(panel, panel.baseline or 0)
    crossed = next((each for each in panel.metrics.values() if each.crossed is not None), None)
    head = [plain(panel.treatment or ""), "Mean", "95 % interval", "Seeds", "Steps"]
    head += [f"Minus {base}", "95 % interval", *(["Seeds and examples"] if crossed else [])]
    head += ["Effect size", "Seen from"]
    rows = []
    for context, title in enumerate(panel.contexts):
        rows += [Row([plain(title)])] if title else []
        rows += [
            _result_row(panel, metric, name, place, crossed=crossed is not None)
            for place, condition in enumerate(panel.conditions)
            if condition.context == context
        ]
    about = ABOUT_RESULTS.format(crossed=_crossed_note(crossed) if crossed else "")
    return Table("Results by condition", head, rows, about, metric.name, numbers_from=1)


def _result_row(panel: Panel, metric: Metric, name: str, place: int, *, crossed: bool) -> Row:
    level = panel.levels[panel.conditions[place].level]
    found, difference, decimals = metric.summary[place], metric.difference[place], metric.decimals
    missing = f" ({metric.missing[place]} missing)" if metric.missing[place] else ""
    return Row(
        [
            level,
            number(found.value, decimals),
            interval(found, decimals),
            f"{found.n}{missing}",
            plain_steps(panel.steps[place]),
            number(difference and difference.value, decimals, signed=True),
            interval(difference, decimals, signed=True),
            *([_crossed(panel.metrics[name], place, decimals)] if crossed else []),
            number(metric.effect_size[place], 2, signed=True),
            number(metric.smallest[place], decimals),
        ],
        level,
    )


def _crossed(metric: Metric, place: int, decimals: int) -> str:
    """The interval over seeds and examples, in the unit of the table."""
    found = metric.crossed[place] if metric.crossed is not None else None
    factor = words_of(metric.name).factor
    return interval(found and found.times(factor), decimals, signed=True)


def _crossed_note(metric: Metric) -> str:
    found = [each for each in metric.crossed or [] if each]
    return (
        f"Seeds and examples: the difference of {words_of(metric.name).text} with both drawn anew, "
        f"so that the interval also covers other test examples of this kind than these "
        f"{found[0].examples:,}. "
    )


def together_table(panel: Panel) -> Table | None:
    """The paired differences of several accuracies side by side: they are not equally sensitive."""
    found = [spoken(panel.metrics[name]) for name in TOGETHER if name in panel.metrics]
    if len(found) < 3:
        return None
    rows = []
    for place in range(len(panel.conditions)):
        changes = [metric.difference[place] for metric in found]
        if all(x is None for x in changes):
            continue
        cells = [
            f"{number(x and x.value, 1, signed=True)} {interval(x, 1, signed=True)}"
            for x in changes
        ]
        rows.append(Row([condition_name(panel, place), *cells, plain_steps(panel.steps[place])]))
    base = level_name(panel, panel.baseline or 0)
    head = (f"Minus {base}", *(metric.name for metric in found), "Steps")
    title = "Accuracies side by side, paired differences with 95 % intervals over seeds"
    return Table(title, head, rows, numbers_from=1)


def metrics_table(panel: Panel) -> Table | None:
    """All metrics of a part in which nothing is compared; intervals if there are seeds for any."""
    found = {name: metric.summary[0] for name, metric in panel.metrics.items()}
    many = any(each.n > 1 for each in found.values())
    rows = [
        Row(
            [name, plain_number(each.value)]
            + ([interval(each, panel.metrics[name].decimals), str(each.n)] if many else [])
        )
        for name, each in found.items()
    ]
    head = ("Metric", "Mean", "95 % interval", "Seeds") if many else ("Metric", "Value")
    return Table(f"All numbers ({len(rows)})", head, rows, numbers_from=1) if rows else None


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    """Every cell against cosine, ours and published."""
    head = ("Task", "Where", "Source", "Metric", "Cell", "ln(cell / cosine)", "95 % interval")
    rows = [
        Row(
            [
                *(found.task, found.about, found.source, found.metric, found.cell),
                number(found.ratio.value, 3, signed=True),
                interval(found.ratio, 3, signed=True),
                str(found.ratio.n or "–"),
                plain_steps(found.steps),
            ]
        )
        for found in comparisons
    ]
    title = "Every cell against cosine, as a table"
    return Table(title, (*head, "Seeds", "Steps"), rows, numbers_from=5)


def unfinished_table(study: Study) -> Table | None:
    """The runs without a result and why."""
    rows = [
        Row([each.run, each.status, each.seed, each.settings, each.reason])
        for each in study.unfinished
    ]
    head = ("Run", "Status", "Seed", "Settings", "Reason")
    return Table(f"Runs without a result ({len(rows)})", head, rows) if rows else None


def tuning_table(study: Study) -> Table | None:
    """The candidates of each choice on validation data, and what was chosen."""
    rows = []
    for choice in study.tuning:
        targets = "; ".join(_settings(one) for one in choice.get("for", []))
        for candidate in choice.get("candidates", []):
            chosen = candidate.get("settings") == choice.get("chosen")
            mean = candidate.get("mean")
            said = number(mean, 4) if isinstance(mean, float) else "–"
            settings = _settings(candidate.get("settings", {}))
            rows.append(Row([targets, settings, said, "chosen" if chosen else ""]))
    head = ("For", "Candidate", "Mean on validation data", "")
    return Table("Settings tuned on validation data", head, rows) if rows else None


def level_name(panel: Panel, level: int) -> str:
    """A level in words: a cell by its name, a number with what it is."""
    name = panel.levels[level]
    return name if panel.treatment in ("cell", "arm") else f"{plain(str(panel.treatment))} {name}"


def condition_name(panel: Panel, place: int) -> str:
    """A level and its setting."""
    condition = panel.conditions[place]
    context = plain(panel.contexts[condition.context])
    return ", ".join(x for x in (level_name(panel, condition.level), context) if x)


def plain_steps(steps: Steps) -> str:
    """The optimiser steps of a row, without the word."""
    return steps_text(steps).removesuffix(" steps") or "–"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
