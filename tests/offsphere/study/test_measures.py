"""A study's metric is one that its script measures: the list is held against what was measured."""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from offsphere.analysis.tables import stored_rows
from offsphere.cli import SCRIPTS
from offsphere.study.measures import check_metric, measures, unmeasured
from offsphere.study.plan import load_study

ROOT = Path(__file__).parents[3]
# Measured with data or flags that no committed study has.
ELSEWHERE = ("style/", "zero_shot_", "chance_*", "majority_*", "judge", "_judged")
ELSEWHERE += ("answer_in_top", "reader_", "ndcg10_by_", "ood_auroc", "norm_penalty")
# Newer than the committed tables; a whole run of each lane's tests has them.
ELSEWHERE += ("polar", "rankme_", "test/negative", "untrained/negative", "permuted", "leverage")
ELSEWHERE += ("train/gor", "validation/score", "norm_gain_")


@pytest.fixture(scope="module")
def measured() -> dict[str, set[str]]:
    """The metrics of each script in the committed tables."""
    found = defaultdict(set)
    for table in ROOT.glob("results/*/runs.csv"):
        for row in stored_rows(table):
            names = {name for name, value in row.items() if "/" in name and value is not None}
            found[row["script"]] |= {name for name in names if not name.startswith("run/")}
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_list_is_what_committed_runs_measured(script: str, measured):
    assert unmeasured(script, sorted(measured[script])) == []
    never = [
        pattern
        for pattern in measures()[script]
        if not any(fnmatchcase(name, pattern) for name in measured[script])
        and not pattern.startswith("run/")
        and not any(word in pattern for word in ELSEWHERE)
    ]
    assert never == []


def test_a_typo_is_refused_with_the_nearest(tmp_path: Path):
    file = tmp_path / "s.yaml"
    study = "script: train_simclr\nseeds: [0]\n"
    file.write_text(study + "metric: test/prob\n")
    with pytest.raises(
        ValueError, match="metric: 'test/prob' is not measured by train_simclr. Did "
    ):
        load_study(file, SCRIPTS)
    tune = "metric: test/accuracy, best: max, seeds: [9], grid: {lr: [0.1]}"
    file.write_text(study + f"metric: test/probe\ntune: {{{tune}}}\n")
    with pytest.raises(
        ValueError, match="tune: metric 'test/accuracy' is not measured by train_si"
    ):
        load_study(file, SCRIPTS)


def test_names_that_depend_on_data_are_known():
    check_metric("metric:", "test/scifact/ndcg10", ["train_retrieval"])
    check_metric("metric:", "test/zero_shot_group", ["train_clip"])
    check_metric("metric:", "test/knn", ["train_clip", "train_simclr"])
    check_metric("metric:", "anything", ["a script of somebody's own"])
    with pytest.raises(ValueError, match="Did you mean 'test/knn' or"):
        check_metric("metric:", "test/knnn", ["train_moco"])
