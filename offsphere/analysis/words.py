"""Metrics and settings in words, shares in points: how papers, figures and answers name them.

A column name such as `test/i2t_r1` is for programs; a reader gets "image-to-text R@1". No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from offsphere.analysis.readings import Metric, Square, decimals_for
from offsphere.estimate import Estimate
from offsphere.run import safe_yaml
from offsphere.share import WORDS

MOMENTS = {"train": "in training", "untrained": "untrained"}


class Words(NamedTuple):
    """What a metric is called, and what its numbers are multiplied with to be written."""

    text: str
    factor: float

    @property
    def unit(self) -> str:
        """The unit of a difference, with a space before it."""
        return " points" if self.factor != 1 else ""

    @property
    def titled(self) -> str:
        """The name with the unit of its values."""
        return f"{self.text} (%)" if self.factor != 1 else self.text


@cache
def _table() -> dict[str, Any]:
    return safe_yaml.load(WORDS.read_text(encoding="utf-8"), WORDS)


def words_of(metric: str) -> Words:
    """A column's name in words; one that is not known keeps its own words."""
    table = _table()
    moment, *places, name = metric.split("/") if "/" in metric else ("", metric)
    text = table["names"].get(name)
    for pattern, said in table["patterns"].items() if text is None else ():
        if re.fullmatch(pattern, name):
            text = re.sub(pattern, said, name)
            break
    about = [*places, MOMENTS.get(moment, "" if moment == "test" else moment)]
    whole = ", ".join([plain(text or name), *(plain(x) for x in about if x)])
    in_points = any(re.fullmatch(pattern, name) for pattern in table["points"])
    return Words(whole, 100.0 if in_points else 1.0)


def plain(text: str) -> str:
    """A name, or names with their values, without the underscores of programs; data such as
    folder:my_images keep theirs."""
    words = text.split(" ")
    return " ".join(word if ":" in word[:-1] else word.replace("_", " ") for word in words)


def spoken(metric: Metric) -> Metric:
    """The metric as it is written: named in words, shares in points with one decimal."""
    words = words_of(metric.name)
    shown = [end for found in metric.summary for end in _ends(found.times(words.factor))]
    return replace(
        metric,
        name=words.titled,
        decimals=1 if words.factor != 1 else max(decimals_for(shown) - 1, 0),
        summary=[found.times(words.factor) for found in metric.summary],
        difference=[found and found.times(words.factor) for found in metric.difference],
        smallest=[found and found * words.factor for found in metric.smallest],
        squares={
            context: Square(*(found.times(words.factor) for found in square))
            for context, square in metric.squares.items()
        },
    )


def mean_and_interval(found: Estimate | None, decimals: int, *, signed: bool = False) -> str:
    """One cell of a paper's table: `mean [low, high]`, or the mean where there is no interval."""
    if found is None or not math.isfinite(found.value):
        return ""
    sign = "+" if signed else ""
    mean, low, high = (_rounded(x, decimals, sign) for x in _ends(found))
    return f"{mean} [{low}, {high}]" if found.bounded else mean


def _ends(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _rounded(value: float, decimals: int, sign: str) -> str:
    """Never -0.0 or +0.0: what rounds to nothing has no sign."""
    text = f"{value:{sign}.{decimals}f}"
    return text.lstrip("+-") if not text.strip("+-0.") else text


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
