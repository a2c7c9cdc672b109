"""What a study says when it ends: figures by hand, words for every case."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from offsphere.analysis.answer import answer_lines, compared, surest
from offsphere.analysis.digest import Study, read_study
from offsphere.analysis.stats import holm
from offsphere.analysis.tables import table_of, write_runs

SEEDS = [0, 42, 1337, 1, 2]
NOISE = dict(zip(SEEDS, [0.01, -0.02, 0.015, 0.0, -0.005], strict=True))


def study(folder: Path, value, **axes) -> Study:
    """A study whose runs ended with the numbers of a function of seed and settings."""
    settings: list[dict] = [{}]
    for name, values in axes.items():
        settings = [{**one, name: x} for one in settings for x in values]
    rows = [
        {"run": f"{place}-{seed}", "status": "finished", "script": "toy", "seed": seed, **one}
        | {"test/score": value(seed, **one)}
        for place, one in enumerate(settings)
        for seed in SEEDS
    ]
    write_runs(table_of(rows), folder / "runs.csv")
    return read_study(folder, published=False)


def test_the_paired_difference_and_its_p_are_those_of_scipy(tmp_path):
    def value(seed, cell):
        return 0.5 + NOISE[seed] * (2 if cell == "dot" else 1) - 0.1 * (cell == "dot")

    found = study(tmp_path, value, cell=["dot", "cosine"])
    (row,) = compared(found)
    assert (row.about, row.level, row.baseline) == ("", "dot", "cosine")
    differences = np.array([NOISE[seed] - 0.1 for seed in SEEDS])
    half = stats.t.ppf(0.975, 4) * differences.std(ddof=1) / np.sqrt(5)
    low, high = differences.mean() - half, differences.mean() + half
    ends = (row.difference.value, row.difference.low, row.difference.high)
    assert ends == pytest.approx((differences.mean(), low, high))
    p = stats.ttest_1samp(differences, 0).pvalue
    head, cosine, dot, said = answer_lines(found)
    assert head.split() == ["cell", "score", "score", "minus", "cosine", "seeds", "steps"]
    assert cosine.split()[:2] == ["cosine", "0.500"]
    assert f"-0.100 [{low:+.3f}, {high:+.3f}]  5" in dot
    assert said == (
        f"dot is below cosine: -0.1 [{low:+.4g}, {high:+.4g}], 5 seeds, p = {p:.2g}; 1 of 1 can be "
        "told from 0."
    )


def test_all_comparisons_of_a_study_are_one_family(tmp_path):
    def value(seed, cell, batch_size):
        gap = {"qnorm": 0.02, "dot": -0.05}.get(cell, 0.0)
        return NOISE[seed] * (cell != "cosine") * batch_size + gap

    found = study(tmp_path, value, cell=["cosine", "qnorm", "dot"], batch_size=[1, 2])
    rows = compared(found)
    assert [(row.about, row.level) for row in rows] == [
        ("batch_size 1", "qnorm"),
        ("batch_size 1", "dot"),
        ("batch_size 2", "qnorm"),
        ("batch_size 2", "dot"),
    ]
    adjusted = holm([row.difference.p for row in rows])
    assert np.argmin(adjusted) == 1
    assert surest(rows).startswith("dot is below cosine at batch_size 1: -0.05 [")
    count = (adjusted < 0.05).sum()
    assert surest(rows).endswith(
        f"p = {adjusted[1]:.2g} of 4 comparisons (Holm); {count} of 4 can be told from 0."
    )


def test_what_cannot_be_told_says_how_many_seeds_are_missing(tmp_path):
    found = study(
        tmp_path,
        lambda seed, cell: 0.5 + (NOISE[seed] + 0.004) * (cell == "dot"),
        cell=["cosine", "dot"],
    )
    said = surest(compared(found))
    assert said.startswith("No difference can be told from 0: the nearest is dot - cosine, +0.004 ")
    assert said.endswith(" more seeds would show it (80 % power).")


def test_arms_are_compared_and_missing_runs_say_so(tmp_path):
    found = study(tmp_path, lambda seed, arm: 1.0 - (arm == "slow"), arm=["plain", "slow"])
    (row,) = compared(found)
    assert (row.level, row.baseline, row.difference.value) == ("slow", "plain", -1.0)
    # The same in every seed: a t-test does not exist, five seeds cannot be sure.
    assert surest([row]) == (
        "No difference can be told from 0: the nearest is slow - plain, -1, 5 seeds."
    )
    found = study(
        tmp_path,
        lambda seed, cell: None if cell == "dot" and seed else 1.0 + seed,
        cell=["cosine", "dot"],
    )
    assert list(answer_lines(found))[-1].startswith("Nothing can be compared yet: ")


def test_without_a_number_it_says_so(tmp_path):
    found = study(tmp_path, lambda seed, cell: None, cell=["cosine", "dot"])
    assert next(answer_lines(found)) == f"{tmp_path.name}: no run has a result yet."


def test_runs_for_tuning_are_not_compared(tmp_path):
    found = study(
        tmp_path, lambda seed, **_: 0.5, cell=["dot", "cosine"], eval_split=["validation"]
    )
    assert list(answer_lines(found)) == [
        "All runs measured validation data, which are for tuning: nothing is compared."
    ]
