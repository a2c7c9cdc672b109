"""How a comparison is shown: lines in a terminal, a page with the forest plot. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from offsphere.analysis.charts import ROW, whiskers, zero_line
from offsphere.analysis.comparison import ALL, ALPHA, Compared, Line, as_rows
from offsphere.analysis.conditions import corner_of
from offsphere.analysis.page_tables import Row, Table
from offsphere.page.charts import Chart, columns, drawn, write_figure
from offsphere.page.engine import render
from offsphere.page.looks import look_of
from offsphere.run.files import write_whole

PAGE, TABLE, FIGURE = "comparison.html", "comparison.csv", "forest"


def show(found: Compared) -> None:
    """The answer in one line, then the lines in columns, under what they compare."""
    head, rows = _cells(found)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    print(_headline(found))
    print(_title(found))
    for row in (head, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print(_about(found))


def write(found: Compared, folder: Path) -> None:
    """The table, the page and the figure."""
    head, rows = _cells(found)
    chart, data = _forest(found)
    table = Table("Comparisons", head, [Row(row) for row in rows], numbers_from=2)
    text = render(
        "offsphere.analysis",
        "comparison.html.j2",
        {},
        found=found,
        title=_title(found),
        about=_about(found),
        answers=[_answer(found, line) for line in found.lines],
        table=table,
        forest=Markup(drawn(chart, data)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    records = as_rows(found)
    content = io.StringIO()
    writer = csv.DictWriter(content, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_whole(folder / TABLE, content.getvalue())
    write_figure(chart, data, folder / FIGURE)
    write_whole(folder / PAGE, text)


def _headline(found: Compared) -> str:
    """Each arm beside the baseline, over all blocks; whether higher is better nobody said."""
    said = []
    for line in {line.arm: line for line in reversed(found.lines)}.values():  # its first line
        side = "higher" if line.difference.value > 0 else "lower"
        word = f"{side} ({line.word})" if line.word.startswith("shown") else line.word
        said.append(f"{line.arm} {word}")
    return f"{found.metric} beside {found.baseline}: {', '.join(reversed(said))}."


def _title(found: Compared) -> str:
    margin = "" if found.margin is None else f", margin {found.margin:g}"
    return (
        f"{found.source}: {found.metric} minus that of {found.arm}={found.baseline}, "
        f"paired by {' and '.join(found.pair)}{margin}"
    )


def _about(found: Compared) -> str:
    """What the numbers are, in sentences that hold for this comparison."""
    count = len(found.lines)
    told = [
        f"95 % t-intervals of paired differences; p is two-sided, after Holm over "
        f"{'this line' if count == 1 else f'these {count} lines'}; verdicts at {ALPHA:.0%} for all "
        "together."
    ]
    if found.margin is None:
        told.append("Without --margin nothing can be called equivalent.")
    else:
        told.append(
            "TOST: small p where the difference lies inside the margin, of each line alone."
        )
    if any(line.difference.examples for line in found.lines):
        told.append("Intervals cover new seeds and new test examples.")
    if found.block is not None:
        told.append(
            f"The line `{ALL}` averages a pair's differences over {found.block}: it holds for "
            "these, not for others of their kind."
        )
    return " ".join(told)


def _cells(found: Compared) -> tuple[list[str], list[list[str]]]:
    """The head and the rows, as a terminal and the page show them."""
    block = [] if found.block is None else [found.block]
    tost = [] if found.margin is None else ["TOST p"]
    head = [found.arm, *block, "verdict", "difference", "pairs", "p (Holm)", *tost, "d_z"]
    head += ["mean", found.baseline]
    rows = []
    for line in found.lines:
        size, d = line.difference, line.difference.effect_size
        pairs = f"{size.n}" + (f" ({size.dropped} dropped)" if size.dropped else "")
        rows.append(
            [
                line.arm,
                *([line.block] if block else []),
                line.word,
                _size(line),
                pairs,
                f"{line.p_adjusted:.3g}",
                *([f"{line.equivalence_p:.3g}"] if line.equivalence_p is not None else []),
                "" if d != d else f"{d:+.2f}",
                f"{line.mean:.5g}",
                f"{line.baseline_mean:.5g}",
            ]
        )
    return head, rows


def _size(line: Line) -> str:
    return format(line.difference, "+.4g")


def _answer(found: Compared, line: Line) -> tuple[str, str]:
    """One line in words: what is compared, and what was found."""
    about = f"{line.arm} minus {found.baseline}"
    about += f", {found.block} {line.block}" if found.block is not None else ""
    return about, f"{line.word}: {_size(line)}"


def _forest(found: Compared) -> tuple[Chart, dict[str, Any]]:
    """Every difference with its interval, the margin shaded."""
    names: list[str] = []
    headings: list[int] = []
    rows: list[dict[str, Any]] = []
    for level, arm in enumerate(dict.fromkeys(line.arm for line in found.lines)):
        if found.block is not None:
            headings.append(len(names))
            names.append(arm)
        for line in (line for line in found.lines if line.arm == arm):
            size, look = line.difference, look_of(corner_of(arm), level + 1)
            about, said = _answer(found, line)
            ends = {"low": size.low, "high": size.high} if size.bounded else {}
            mark = {"paint": look.paint, "shape": look.shape}
            told = {"row": len(names), "mean": size.value, "text": f"{about}\n{said}"}
            rows.append({"low": size.value, "high": size.value} | told | ends | mark)
            names.append(line.block if found.block is not None else arm)
    own = (_as_given("paint"), _as_given("shape"))
    layers: Sequence[Chart] = [zero_line(), *whiskers(names, headings, own)]
    if found.margin is not None:
        band = {"low": -found.margin, "high": found.margin}
        ends = {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}
        zone = {"type": "rect", "color": "var(--zone)", "aria": False}
        layers = [{"data": {"values": [band]}, "mark": zone, "encoding": ends}, *layers]
    chart = {
        "data": {"name": "rows"},
        "layer": layers,
        "width": 420,
        "height": ROW * len(names),
    }
    return chart, {"rows": columns(rows)}


def _as_given(field: str) -> Chart:
    """A channel whose values are what is drawn."""
    return {"field": field, "type": "nominal", "scale": None, "legend": None}
