"""A study's results as tables: tidy numbers as CSV, for papers as LaTeX and Markdown. No torch.

In a paper's table a row is a condition and a cell reads `mean [low, high]`, shares in points.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.analysis.conditions import steps_text
from offsphere.analysis.digest import Study
from offsphere.analysis.panels import Panel, file_name
from offsphere.analysis.tables import csv_lines, is_missing
from offsphere.analysis.words import mean_and_interval, plain, spoken, words_of
from offsphere.names import unknown
from offsphere.run.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

DIGITS = 4
"""Significant digits in a table for a paper; CSV keeps them all."""
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\n": " "}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def write_tables(study: Study, folder: Path, metrics: Sequence[str] = ()) -> None:
    """The results of each part, for the study's metric or the chosen ones, in three forms."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, panel in enumerate(study.panels):
        chosen = [name for name in metrics if name in panel.metrics] or shown_metrics(panel)
        tidy, paper = results_table(panel, chosen), paper_table(panel, chosen)
        texts = {"csv": as_csv(tidy), "md": as_markdown(paper), "tex": as_latex(paper)}
        for suffix, text in texts.items():
            path = folder / f"{file_name(panel, place)}.{suffix}"
            write_whole(path, text)


def shown_metrics(panel: Panel) -> list[str]:
    """The study's own metric; where nothing is compared, all of them."""
    if panel.treatment is None:
        return list(panel.metrics)
    return [panel.primary] if panel.primary else []


def check_metrics(studies: Sequence[Study], metrics: Sequence[str]) -> None:
    """Refuse a metric that no part of any study has."""
    known = {name for study in studies for panel in study.panels for name in panel.metrics}
    for name in metrics:
        if name not in known:
            raise unknown("metric", name, sorted(known))


def results_table(panel: Panel, metrics: Sequence[str]) -> pd.DataFrame:
    """One row per metric and condition: mean, interval, seeds, paired difference, effect size."""
    import pandas as pd

    rows = []
    for name in metrics:
        metric = panel.metrics[name]
        for place, condition in enumerate(panel.conditions):
            found, difference = metric.summary[place], metric.difference[place]
            rows.append(
                {
                    "setting": panel.contexts[condition.context],
                    panel.treatment or "runs": panel.levels[condition.level],
                    "metric": name,
                    "mean": found.value,
                    "low": found.low,
                    "high": found.high,
                    "seeds": found.n,
                    "steps": _steps(panel, place),
                    "missing": metric.missing[place],
                    "difference": difference.value if difference else None,
                    "difference low": difference.low if difference else None,
                    "difference high": difference.high if difference else None,
                    "effect size": metric.effect_size[place],
                }
            )
    return pd.DataFrame(rows)


def paper_table(panel: Panel, metrics: Sequence[str]) -> pd.DataFrame:
    """One row per condition; each metric, and its paired difference, in one cell with interval."""
    import pandas as pd

    if panel.treatment is None:
        return pd.DataFrame([_alone(panel, name) for name in metrics])
    base, rows = panel.levels[panel.baseline or 0], []
    written = [(words_of(name), spoken(panel.metrics[name])) for name in metrics]
    for place, condition in enumerate(panel.conditions):
        row: dict[str, Any] = {}
        if any(panel.contexts):
            row["setting"] = plain(panel.contexts[condition.context])
        row[plain(panel.treatment)] = panel.levels[condition.level]
        for words, metric in written:
            change = f"{words.text} minus {base}{' (points)' if words.unit else ''}"
            row[words.titled] = mean_and_interval(metric.summary[place], metric.decimals)
            row[change] = mean_and_interval(metric.difference[place], metric.decimals, signed=True)
        row["seeds"] = min((metric.summary[place].n for _, metric in written), default=0)
        row["steps"] = _steps(panel, place)
        rows.append(row)
    return pd.DataFrame(rows)


def _alone(panel: Panel, name: str) -> dict[str, Any]:
    """A metric of a part in which nothing is compared."""
    metric = spoken(panel.metrics[name])
    found = metric.summary[0]
    return {
        "metric": metric.name,
        "value": mean_and_interval(found, max(metric.decimals, 3)),
        "seeds": found.n,
        "steps": _steps(panel, 0),
    }


def _steps(panel: Panel, place: int) -> str:
    """The optimiser steps of a condition's runs: without them a figure says little."""
    return steps_text(panel.steps[place]).removesuffix(" steps")


def as_csv(table: pd.DataFrame) -> str:
    """A table with every digit."""
    return csv_lines(_cells(table, None))


def as_markdown(table: pd.DataFrame) -> str:
    """A table as Markdown; whatever the cells hold, it stays one table."""
    head, *body = [[_escape_markdown(cell) for cell in line] for line in _cells(table, DIGITS)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *body))


def as_latex(table: pd.DataFrame) -> str:
    """A table as LaTeX, with the rules of booktabs."""
    cells = [[_escape_latex(cell) for cell in line] for line in _cells(table, DIGITS)]
    head, *body = (" & ".join(line) + r" \\" for line in cells)
    rules = [f"\\begin{{tabular}}{{{'l' * len(cells[0])}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*rules, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _cells(table: pd.DataFrame, digits: int | None) -> list[list[str]]:
    """The head and the rows as strings."""
    rows = table.itertuples(index=False, name=None)
    return [
        [str(column) for column in table.columns],
        *([_cell_text(value, digits) for value in row] for row in rows),
    ]


def _cell_text(value: Any, digits: int | None) -> str:
    if is_missing(value):
        return ""
    if isinstance(value, float):
        return repr(float(value)) if digits is None else f"{value:.{digits}g}"
    return str(value)


def _escape_markdown(cell: str) -> str:
    cell = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", cell)
    cell = cell.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"\s*[\r\n]+\s*", " ", cell)


def _escape_latex(cell: str) -> str:
    """The cell as LaTeX shows it, numbers with a minus sign instead of a hyphen."""
    cell = re.sub(r"[\\~^<>|\n&%$#_{}]", lambda found: LATEX[found[0]], cell)
    return re.sub(r"(?<![\w.}])-(?=\d)", "$-$", cell)
