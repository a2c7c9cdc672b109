"""Numbers as pages write them. No torch."""

from __future__ import annotations

import math
import re
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Protocol

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DIGITS = 4
"""Significant digits of what a page draws; what it writes is rounded from six."""


class Interval(Protocol):
    """Anything with the two ends of an interval."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def number(value: float | None, decimals: int, *, signed: bool = False) -> str:
    """A number with this many decimals, ties rounded up; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    size, step = Decimal(float(f"{abs(value):.6g}")), Decimal(1).scaleb(-decimals)
    rounded = size.quantize(step, ROUND_HALF_UP, Context(prec=400))
    sign = "" if rounded == 0 else "−" if value < 0 else "+" if signed else ""
    return f"{sign}{rounded:f}"


def interval(found: Interval | None, decimals: int, *, signed: bool = False) -> str:
    """Two ends in brackets; a dash where there is none."""
    if found is None or not (math.isfinite(found.low) and math.isfinite(found.high)):
        return "–"
    ends = (number(end, decimals, signed=signed) for end in (found.low, found.high))
    return f"[{', '.join(ends)}]"


def plain_number(value: float) -> str:
    """A number by itself: four significant digits, two and a power of ten if tiny or huge."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e9:
        text = f"{value:.4g}" if size < 1e4 else f"{value:,.0f}"
        return text.replace("-", "−")
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa} × 10{str(int(power)).translate(RAISED)}".replace("-", "−")


def seed_count(n: int) -> str:
    """How many seeds, in words."""
    return f"{n} seed{'' if n == 1 else 's'}"


def with_minus(text: str) -> str:
    """A sentence with the sign of a minus, not a hyphen, before its numbers."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", text)


def short(value: float | None, digits: int = DIGITS) -> float | None:
    """A number as a page carries it for its charts; None where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
