"""What closes a run: a table with intervals, and a picture with accuracies."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from crossmodal.settings import COLUMNS
from offsphere.estimate import Estimate
from offsphere.evaluation.intervals import wilson
from offsphere.run.record import RunFolder
from offsphere.training.script import closing_table, interval
from offsphere.training.settings import IMAGE_COLUMNS
from offsphere.training.telemetry import measured, plot_run
from text.settings import RETRIEVAL_COLUMNS, STS_COLUMNS


def test_intervals_by_metric():
    scores = np.array([0.1, 0.4, 0.7, 0.2])
    outcomes = {
        "knn_correct": np.ones(50),
        "i2t_hit1": np.zeros(40),
        "ndcg10": scores,
        "untrained_ndcg10": scores / 2,
        "norm": scores,
    }
    assert interval("test/knn", 0.5, outcomes) == Estimate(0.5, *wilson(0.5, 50, 0.95), 50)
    assert interval("untrained/knn", 0.4, outcomes) == Estimate(0.4, *wilson(0.4, 50, 0.95), 50)
    assert interval("test/i2t_r1", 0.0, outcomes) == Estimate(0.0, *wilson(0.0, 40, 0.95), 40)
    half = 1.959964 * scores.std(ddof=1) / 2
    found = interval("test/ndcg10", 0.35, outcomes)
    assert found is not None
    assert (found.low, found.high, found.n) == pytest.approx((0.35 - half, 0.35 + half, 4))
    assert interval("untrained/ndcg10", 0.175, outcomes) is not None
    for other in ("train/norm_left_cv", "test/majority", "test/norm", "bm25/ndcg10"):
        assert interval(other, 9.0, outcomes) is None


def test_the_closing_table_has_steps_intervals_and_n():
    columns = (
        ("test/knn", "kNN", "{:.1%}"),
        ("test/majority", "largest", "{:.1%}"),
        ("test/no", "no", "{}"),
    )
    metrics = {"test/knn": 0.5, "test/majority": 0.1, "run/steps": 1000}
    low, high = wilson(0.5, 1200, 0.95)
    title, *rows = printed(closing_table("dot", metrics, columns, {"knn_correct": np.ones(1200)}))
    assert title == ["cell dot, 1,000 steps"]
    assert rows == [
        ["", "value", "95 % interval", "n"],
        ["kNN", "50.0%", f"{low:.1%} to {high:.1%}", "1,200"],
        ["largest", "10.0%", "", ""],
    ]
    (*_, bare) = printed(closing_table("dot", {"test/knn": 0.5}, columns, {}))
    assert bare == ["kNN", "50.0%", "", ""]


@pytest.mark.parametrize("columns", [IMAGE_COLUMNS, COLUMNS, RETRIEVAL_COLUMNS, STS_COLUMNS])
def test_no_closing_table_is_cut_at_80_characters(columns):
    metrics = {name: 0.5 for name, _, _ in columns}
    means = [name.partition("/")[2] for name, _, form in columns if isinstance(form, str)]
    outcomes = {f"{name}_correct": np.ones(12_000) for name in means}
    _, _, *rows = printed(closing_table("learnable", metrics, columns, outcomes))
    assert [row[0] for row in rows] == [title for _, title, _ in columns]
    assert [row[1] for row in rows] == [
        form.format(0.5) if isinstance(form, str) else form(0.5) for _, _, form in columns
    ]


def printed(table: Table) -> list[list[str]]:
    """The cells of a table as a terminal of 80 characters shows it, its title first."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    lines = [x for x in console.export_text().splitlines() if not set(x) & set("┏┡└")]
    return [[cell.strip() for cell in re.split("[│┃]", x.strip().strip("│┃"))] for x in lines]


def test_accuracies_over_the_samples_seen():
    steps = [{"step": 0, "samples": 8}, {"step": 1, "samples": 16, "test/knn": 0.3}]
    metrics = {"untrained/knn": 0.1, "test/knn": 0.4, "test/norm_embedding_cv": 0.2}
    assert measured(steps, metrics, 24) == {"kNN": ([0, 16, 24], [0.1, 0.3, 0.4])}
    assert measured(steps[:1], {}, 8) == {}


def test_a_picture_with_and_without_accuracies(tmp_path):
    folder = RunFolder(tmp_path)
    names = ("norm_left_q50", "norm_left_q05", "norm_left_q95", "norm_right_q50", "norm_right_q05")
    names += ("norm_right_q95", "norm_left_cv", "norm_right_cv", "negative_variance", "alignment")
    names += ("uniformity", "gradient_norm", "lr", "loss", "contrastive")
    for step in range(3):
        row = {f"train/{name}": 1.0 + step for name in names}
        folder.log_step({"step": step, "samples": 8 * (step + 1), **row})
    plot_run(folder, {"test/probe": 0.5})
    assert (tmp_path / "run.png").stat().st_size > 10_000
    plot_run(folder)
