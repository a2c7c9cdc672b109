"""What closes a run: a table with intervals, and a picture with accuracies."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from offsphere.estimate import Estimate
from offsphere.evaluation.intervals import wilson
from offsphere.run.record import RunFolder
from offsphere.training.script import _add_certainty, interval
from offsphere.training.telemetry import measured, plot_run


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


def test_the_closing_table_has_intervals_and_n(tmp_path):
    from safetensors.numpy import save_file

    save_file({"knn_correct": np.ones(50)}, tmp_path / "examples.safetensors")
    columns = [("test/knn", "kNN", "{:.1%}"), ("test/majority", "largest", "{:.1%}")]
    table = Table("cell", "kNN", "largest")
    _add_certainty(table, columns, {"test/knn": 0.5, "test/majority": 0.1}, tmp_path)  # type: ignore
    console = Console(width=80, record=True)
    console.print(table)
    low, high = wilson(0.5, 50, 0.95)
    cells = [line.split("│")[2].strip() for line in console.export_text().splitlines()[3:-1]]
    assert cells == [f"{low:.1%}", f"{high:.1%}", "50"]
    empty = Table("cell", "kNN", "largest")
    _add_certainty(empty, columns, {"test/knn": 0.5, "test/majority": 0.1}, tmp_path / "no")  # type: ignore
    assert empty.row_count == 0


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
