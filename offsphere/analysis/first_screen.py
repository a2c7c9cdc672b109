"""The first screen of the report: what a reader with a task of their own came to ask. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offsphere.analysis.claims import Verdict
from offsphere.analysis.conditions import steps_text
from offsphere.analysis.words import words_of
from offsphere.estimate import Estimate
from offsphere.page.numbers import interval, number
from offsphere.run import safe_yaml


class Told(NamedTuple):
    """What was measured on one kind of task; `claim` is None for a heading."""

    task: str
    claim: str | None = None
    word: str = ""
    style: str = ""
    sign: str = ""
    size: str = ""
    rest: str = ""


class Answer(NamedTuple):
    """A question, and a row for each kind of task."""

    question: str
    rows: list[Told]


def first_screen(file: Path, lines: Sequence[Verdict]) -> Answer | None:
    """The panel of the pictures that `asks`, its measured rows in words."""
    plates = safe_yaml.load(file.read_text(encoding="utf-8"), file) if file.exists() else []
    board = {line.claim.id: line for line in lines}
    for panel in (panel for plate in plates for panel in plate["panels"]):
        if question := panel.get("asks"):
            rows = list(_rows(panel["rows"], board))
            return Answer(question, rows) if any(row.claim for row in rows) else None
    return None


def _rows(rows: Sequence[Mapping[str, Any]], board: Mapping[str, Verdict]) -> Iterator[Told]:
    """Headings wait until something below them was measured."""
    heading: Told | None = None
    for key, words in (next(iter(row.items())) for row in rows):
        if key == "heading":
            heading = Told(words)
        elif key in board and board[key].measured is not None:
            if heading is not None:
                yield heading
                heading = None
            yield _told(words, board[key])


def _told(task: str, line: Verdict) -> Told:
    """A contrast of dot and cosine in the reader's words; log ratios become per cent."""
    found, claim = line.measured, line.claim
    assert found is not None
    metric = words_of(claim.terms[0][0])
    if claim.transform == "log":
        middle, low, high = (100 * math.expm1(x) for x in (found.value, found.low, found.high))
        value, unit = Estimate(middle, low, high, found.n), " %"
        decimals = 0 if abs(found.value) > 0.1 else 1
    else:
        value = Estimate(found.value, found.low, found.high, found.n).times(metric.factor)
        unit = metric.unit
        decimals = 2 if metric.factor != 1 else 3
    word, style, sign = "no difference shown", "not-settled", "?"
    if found.low > 0:
        word, style, sign = "helps", "holds", "✓"
    elif found.high < 0:
        word, style, sign = "costs", "fails", "✕"
    size = f"{number(value.value, decimals, signed=True)}{unit}"
    of_what = f"of cosine's {metric.text}" if claim.transform == "log" else metric.text
    rest = [f"{interval(value, decimals, signed=True)} {of_what}", found.count]
    rest.append(steps_text(line.steps))
    return Told(task, claim.id, word, style, sign, size, ", ".join(filter(None, rest)))
