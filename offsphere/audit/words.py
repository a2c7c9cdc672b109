"""The numbers of an audit's table in words, for the console, the page and the advice. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from offsphere.audit.table import HALF, Problem, Table
from offsphere.estimate import Estimate

if TYPE_CHECKING:
    from offsphere.audit.search import Direction


class Remedy(NamedTuple):
    """A post-hoc similarity as it is shown."""

    name: str
    value: str
    """On the judged half; empty if it could not be fitted."""
    gain: Estimate | None
    """Over cosine."""
    remark: str
    """Why there is no gain."""


def points(difference: Estimate) -> str:
    """A difference of shares in percentage points, with its interval."""
    x = difference.times(100)
    return f"{x.value:+.1f} points [{x.low:+.1f}, {x.high:+.1f}]"


def gain(difference: Estimate) -> str:
    """A difference that is above 0 as what it gains."""
    x = difference.times(100)
    return f"{x.value:.1f} points [{x.low:.1f}, {x.high:.1f}]"


def cost(difference: Estimate) -> str:
    """A difference that is below 0 as what it costs."""
    return gain(Estimate(-difference.value, -difference.high, -difference.low, difference.n))


def percent(found: Estimate) -> str:
    """A share with its interval."""
    return f"{found.value:.1%} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def p_value(p: float) -> str:
    """A p with two digits, or its bound where it is tiny."""
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def number(value: float) -> str:
    """Three digits, and a dash where there is no number."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def shown_remedies(table: Table, direction: Direction, problems: Sequence[Problem]) -> list[Remedy]:
    """The remedies of a direction, cosine first, those that could not be fitted last."""
    place, metric = direction.place, f"{direction.metric}{HALF}"
    rows = []
    for name in table.scores(*place, metric):
        gain = table.get(*place, name, f"{direction.metric}_minus_cosine{HALF}")
        same = gain is None and name != "cosine"
        value = f"{table.value(*place, name, metric):.1%}"
        rows.append(Remedy(name, value, gain, "same ranking by construction" if same else ""))
    failed = [Remedy(x.scored_with, "", None, x.problem) for x in problems if x[:2] == place]
    return rows + failed
