"""HTML that is escaped unless it is known to be HTML, and numbers as the page writes them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal

from offsphere.estimate import Estimate

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
VOID = frozenset({"meta", "col", "br", "img"})


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An HTML element; children and values are escaped, `class_` is class, None leaves one out."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    spelt = "".join(
        f" {names[name]}" if value is True else f' {names[name]}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    inside = "".join(
        child if isinstance(child, Html) else html.escape(str(child))
        for child in children
        if child is not None
    )
    return Html(f"<{tag}{spelt}>" if tag in VOID else f"<{tag}{spelt}>{inside}</{tag}>")


def number(value: float | None, decimals: int, *, signed: bool = False) -> str:
    """A number as the page and its script write it, ties rounded up; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    size, step = Decimal(shortened(abs(value))), Decimal(1).scaleb(-decimals)
    rounded = size.quantize(step, ROUND_HALF_UP, Context(prec=400))
    sign = "" if rounded == 0 else "−" if value < 0 else "+" if signed else ""
    return f"{sign}{rounded:f}"


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


def shortened(value: float) -> float:
    """Six significant digits, which is what the page carries."""
    return float(f"{value:.6g}")


def interval(found: Estimate | None, decimals: int, *, signed: bool = False) -> str:
    """An interval as the page writes it; a dash where there is none."""
    if found is None or not (math.isfinite(found.low) and math.isfinite(found.high)):
        return "–"
    ends = (number(end, decimals, signed=signed) for end in (found.low, found.high))
    return f"[{', '.join(ends)}]"


def seed_count(n: int) -> str:
    """How many seeds, in words."""
    return f"{n} seed{'' if n == 1 else 's'}"


def table(head: Sequence[str], rows: Sequence[Html], *, numbers_from: int = 99) -> Html:
    columns = (
        element("th", name, scope="col", class_="num" if place >= numbers_from else None)
        for place, name in enumerate(head)
    )
    return element(
        "table", element("thead", element("tr", *columns)), element("tbody", *rows), class_="plain"
    )


def scrolled(label: str, content: Html) -> Html:
    """A table that scrolls by itself where it is wider than the page, by keyboard too."""
    return element("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")
