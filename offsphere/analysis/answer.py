"""What a study says about its own question: the first screen of its page, its end in a terminal.

On the page a difference is shown if its 95 % interval over paired seeds leaves out 0. The terminal
names the surest of all differences, with its p adjusted for their number. Whether higher is better
depends on the metric, so the sentences say above and below. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from offsphere.analysis.digest import Study
from offsphere.analysis.panels import Panel
from offsphere.analysis.paper_tables import paper_table
from offsphere.analysis.power import MOST_SEEDS, seeds_for_difference
from offsphere.analysis.readings import Metric
from offsphere.analysis.stats import OverSeeds, holm, paired_difference
from offsphere.analysis.words import listed, mean_and_interval, plain, spoken, words_of
from offsphere.estimate import Estimate
from offsphere.page.numbers import seed_count

ALPHA = 0.05


class Answer(NamedTuple):
    """One sentence, and the part and context that it is about."""

    about: str
    text: str


def answers(study: Study) -> list[Answer]:
    """One sentence for each part and context of a study."""
    found = []
    for panel in study.panels:
        part = panel.name if len(study.panels) > 1 else ""
        if panel.primary is None:
            found.append(Answer(plain(part), "No run has a result yet."))
            continue
        for context, name in enumerate(panel.contexts):
            about = ", ".join(plain(x) for x in (part, name) if x)
            found.append(Answer(about, sentence(panel, context)))
    return found


def sentence(panel: Panel, context: int) -> str:
    """What is shown, and what is not, about one context of a part."""
    name = str(panel.primary)
    metric, words = spoken(panel.metrics[name]), words_of(name)
    places = [i for i, c in enumerate(panel.conditions) if c.context == context]
    if panel.treatment is None or len(places) < 2:
        values = metric.summary[places[0]]
        found = mean_and_interval(values, metric.decimals) or "no number"
        return f"Nothing is compared: {metric.name} {found}, {seed_count(values.n)}."
    base = next((i for i in places if panel.conditions[i].level == panel.baseline), None)
    if base is None:
        return f"No run of {_level(panel, panel.baseline or 0)}, with which others are compared."
    changes = {i: d for i in places if (d := metric.difference[i]) and math.isfinite(d.value)}
    if not changes:
        return f"No seed has a result for both {_name(panel, base)} and another."
    shown = {i: d for i, d in changes.items() if d.low > 0 or d.high < 0}
    others = {i: d for i, d in changes.items() if i not in shown}
    told = [
        f"{_name(panel, i)} is {'above' if d.value > 0 else 'below'} {_name(panel, base)}: "
        f"{mean_and_interval(d, metric.decimals, signed=True)}{words.unit}, {seed_count(d.n)}"
        for i, d in sorted(shown.items(), key=lambda item: -abs(item[1].value))
    ]
    if others:
        told.append(_not_shown(panel, metric, base, others, words.unit))
    return f"{words.text}: " + "; ".join(told) + "."


class Compared(NamedTuple):
    """One level of the treatment against the baseline of its context."""

    about: str
    level: str
    baseline: str
    difference: OverSeeds


def answer_lines(study: Study) -> Iterator[str]:
    """Lines for a terminal: each part as a table, then what can be said of all differences."""
    if not study.panels:
        yield "All runs measured validation data, which are for tuning: nothing is compared."
        return
    for panel in study.panels:
        if panel.primary is None:
            yield f"{panel.name or study.name}: no run has a result yet."
            continue
        table = paper_table(panel, [panel.primary])
        rows = [list(map(str, row)) for row in table.itertuples(index=False, name=None)]
        lines = [[str(name) for name in table.columns], *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            yield "  ".join(cells).rstrip()
    yield surest(compared(study))


def compared(study: Study) -> list[Compared]:
    """Every level against its baseline, seed by seed, in the study's own metric."""
    found = []
    for panel in study.panels:
        if panel.primary is None or panel.baseline is None:
            continue
        values = panel.metrics[panel.primary].values
        for place, condition in enumerate(panel.conditions):
            base = panel.condition(condition.context, panel.baseline)
            if base is None or base == place:
                continue
            pair = np.array([values[place], values[base]])
            if np.isfinite(pair).all(axis=0).sum() < 2:
                continue
            part = panel.name if len(study.panels) > 1 else ""
            about = ", ".join(filter(None, [part, panel.contexts[condition.context]]))
            names = _name(panel, place), _name(panel, base)
            found.append(Compared(about, *names, paired_difference(*pair)))
    return found


def surest(rows: Sequence[Compared]) -> str:
    """Which level differs most surely, or how many seeds it would take to tell.

    All comparisons of a study are one family: the more there are, the likelier it is that chance
    alone makes one of them look sure. Holm's adjustment takes that out.
    """
    if not rows:
        return "Nothing can be compared yet: give every level at least 2 seeds in common."
    adjusted = holm([row.difference.p for row in rows])
    best = min(range(len(rows)), key=lambda i: (adjusted[i], -abs(rows[i].difference.value)))
    row, difference = rows[best], rows[best].difference
    at = f" at {row.about}" if row.about else ""
    figures = f"{difference:+.4g}, {difference.n} seeds"
    family = f" of {len(rows)} comparisons (Holm)" if len(rows) > 1 else ""
    if adjusted[best] < ALPHA:
        side = "above" if difference.value > 0 else "below"
        shown = sum(p < ALPHA for p in adjusted)
        return (
            f"{row.level} is {side} {row.baseline}{at}: {figures}, p = {adjusted[best]:.2g}"
            f"{family}; {shown} of {len(rows)} can be told from 0."
        )
    said = f"No difference can be told from 0{family}: the nearest is {row.level} - "
    said += f"{row.baseline}{at}, {figures}"
    if difference.sd == 0 or difference.value == 0:
        return f"{said}."
    needed = seeds_for_difference(difference.sd, difference.value, alpha=ALPHA / len(rows))
    if needed is None:
        return f"{said}; not even {MOST_SEEDS} seeds would show one of that size."
    more = max(needed - difference.n, 1)
    return f"{said}; if it is of that size, about {more} more seeds would show it (80 % power)."


def _not_shown(
    panel: Panel, metric: Metric, base: int, others: dict[int, Estimate], unit: str
) -> str:
    """Which differences the seeds do not show, the largest of them, and what they would show."""
    names = listed([_name(panel, i) for i in others])
    largest = max(others, key=lambda i: abs(others[i].value))
    found = others[largest]
    said = f"{mean_and_interval(found, metric.decimals, signed=True)}{unit}"
    if len(others) > 1:
        said = f"at most {_name(panel, largest)}, {said}"
    seen, seeds = metric.smallest[largest], seed_count(found.n)
    if found.n < 2:
        return (
            f"{names} against {_name(panel, base)}: {said}, {seeds}; an interval needs two seeds "
            "or more"
        )
    if seen:
        least = f"{seen:.{metric.decimals}f}{unit}"
        seeds = f"{seeds} would show {least} or more, with 80 % power"
    return f"no difference to {_name(panel, base)} is shown for {names} ({said}; {seeds})"


def _name(panel: Panel, place: int) -> str:
    return _level(panel, panel.conditions[place].level)


def _level(panel: Panel, level: int) -> str:
    name = panel.levels[level]
    return name if panel.treatment in ("cell", "arm") else f"{plain(str(panel.treatment))} {name}"
