"""Collection by collection: do norms predict what keeping them is worth? The paper's figures 3, 5.

A correlation over collections is the published sign that magnitude matters. Beside it stands the
same with norms that were permuted among the documents, whose Cohen's d can say nothing. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.analysis.charts import Drawing, template, zero_line
from offsphere.analysis.conditions import all_steps, numbers, steps_text, text_of
from offsphere.analysis.overview import Overview, Plate
from offsphere.analysis.tables import StudyTables
from offsphere.analysis.words import plain
from offsphere.page.charts import columns
from offsphere.page.numbers import seed_count

if TYPE_CHECKING:
    import pandas as pd

MEASURED = re.compile(r"test/(.+)/cohens_d")
FEWEST = 5
"""Collections below which there is no picture."""
NORMS = "real norms", "permuted norms"


def collection_plates(studies: Sequence[StudyTables]) -> dict[str, Plate]:
    """One picture for each study that was judged on several collections, by name."""
    found = {f"collections_{s.folder.name}": _plate(s.runs) for s in studies if len(s.runs)}
    return {name: Plate(TITLE, charts) for name, charts in found.items() if charts}


TITLE = "Do norms that carry relevance predict what keeping them is worth, over collections?"


def _plate(runs: pd.DataFrame) -> list[Overview]:
    names = [found[1] for c in map(str, runs.columns) if (found := MEASURED.fullmatch(c))]
    runs = runs.loc[runs["status"] == "finished"].drop_duplicates("run")
    if len(names) < FEWEST:
        return []
    gains, ratios, settings = [], [], []
    for setting, rows in _settings(runs):
        by_cell = {cell: rows.loc[rows["cell"] == cell] for cell in rows["cell"].unique()}
        gain = [row for cell in by_cell for row in _gains(str(cell), by_cell[cell], names)]
        if not gain:
            continue
        steps = all_steps((int(x), int(x)) for x in rows["run/steps"])
        told = ", ".join(filter(None, [seed_count(len(set(rows["seed"]))), steps_text(steps)]))
        settings.append(f"{setting} ({told})" if setting else told)
        gains += [{**row, "setting": settings[-1]} for row in gain]
        ratios += [{**row, "setting": settings[-1]} for row in _ratios(by_cell, names)]
    cells = sorted({row["cell"] for row in gains}, key=lambda cell: (cell != "qnorm", cell))
    controls: dict[str, list[str]] = {"setting": settings, "cell": cells}
    charts = [
        _scatter(
            "gain", gains, controls, "Cohen's d of the documents (relevant ones longer: above 0)"
        )
    ]
    if ratios:
        title = "queries' norm CV trained with dnorm / trained with dot"
        charts.append(_scatter("ratio", ratios, {"setting": settings}, title))
    return charts if gains else []


def _settings(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The runs of each part and arm, which differ in cell and seed alone."""
    by = [column for column in ("part", "arm") if column in runs.columns]
    if not by:
        yield "", runs
        return
    for key, rows in runs.groupby(by, sort=False, dropna=False):
        words = (text_of(x) for x in key)  # pyright: ignore[reportGeneralTypeIssues]
        yield plain(", ".join(word for word in words if word != "none")), rows


def _mean(rows: pd.DataFrame, name: str, metric: str) -> float:
    column = f"test/{name}/{metric}"
    values = numbers(rows.loc[:, column]) if column in rows.columns else np.zeros(0)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else np.nan


def _gains(cell: str, rows: pd.DataFrame, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each collection's Cohen's d with the gain of scoring with the documents' norms, in points."""
    for name in names:
        without = _mean(rows, name, "ndcg10_scored_cosine")
        for norms, x, y in zip(
            NORMS,
            ("cohens_d", "cohens_d_permuted"),
            ("ndcg10_scored_dot", "ndcg10_permuted"),
            strict=True,
        ):
            point = {"x": _mean(rows, name, x), "y": 100 * (_mean(rows, name, y) - without)}
            yield from _point(point, name, norms, cell=cell)


def _ratios(by_cell: Mapping[Any, pd.DataFrame], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each collection's ratio of the queries' variations with dnorm minus qnorm, in points."""
    if not {"dnorm", "qnorm", "dot"} <= by_cell.keys():
        return
    for name in names:
        dnorm, dot = (_mean(by_cell[cell], name, "norm_query_cv") for cell in ("dnorm", "dot"))
        left, right = (_mean(by_cell[cell], name, "ndcg10") for cell in ("dnorm", "qnorm"))
        yield from _point({"x": dnorm / dot, "y": 100 * (left - right)}, name, NORMS[0])


def _point(point: dict[str, float], name: str, norms: str, **more: str) -> Iterator[dict[str, Any]]:
    if np.isfinite(list(point.values())).all():
        text = f"{name}, {norms}\n{point['x']:.3g}; {point['y']:+.3g} points"
        yield {**point, "name": name, "norms": norms, "text": text, **more}


def _scatter(
    name: str, rows: Sequence[Mapping[str, Any]], controls: Mapping[str, Sequence[str]], x: str
) -> Overview:
    titles = {
        "gain": (
            "What keeping the documents' norms is worth",
            "nDCG@10, with norms minus without, points",
        ),
        "ratio": ("Which side to keep", "nDCG@10, dnorm minus qnorm, points"),
    }
    title, y = titles[name]
    data = f"collections_{name}"
    chart = template("scatter", data=data, x=x, y=y, zero=zero_line("y"), norms=list(NORMS))
    chosen = {key: key for key in controls}
    caption = "a point is a collection, the mean over seeds"
    return Overview(Drawing(caption, chart, chosen), {data: columns(rows)}, controls, title)
