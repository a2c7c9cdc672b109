"""Tables for papers: whatever the cells hold, a table stays a table."""

from __future__ import annotations

import csv
import io

import pandas as pd

from offsphere.analysis.paper_tables import as_csv, as_latex, as_markdown

NASTY = pd.DataFrame(
    {"a_b|c": [r"50% & $x_1$ {~^\} #<b>", "line\nbreak *bold* `code`"], "n": [0.1, None]}
)


def test_markdown_stays_one_table():
    lines = as_markdown(NASTY).splitlines()
    assert lines[:2] == [r"| a\_b\|c | n |", "| --- | --- |"]
    assert lines[2] == r"| 50% &amp; \$x\_1\$ {\~^\\} #&lt;b&gt; | 0.1 |"
    assert lines[3] == r"| line break \*bold\* \`code\` |  |"
    assert len(lines) == 4


def test_latex_is_escaped():
    lines = as_latex(NASTY).splitlines()
    assert lines[0] == r"\begin{tabular}{ll}"
    assert lines[2] == r"a\_b\textbar{}c & n \\"
    escaped = r"50\% \& \$x\_1\$ \{\textasciitilde{}\textasciicircum{}\textbackslash{}\} "
    assert lines[4] == escaped + r"\#\textless{}b\textgreater{} & 0.1 \\"
    assert lines[5] == r"line break *bold* `code` &  \\"


def test_csv_keeps_every_digit():
    table = pd.DataFrame({"x": [1 / 3], "t": ['a,"b"\nc']})
    rows = list(csv.reader(io.StringIO(as_csv(table), newline="")))
    assert rows == [["x", "t"], [repr(1 / 3), 'a,"b"\nc']]
