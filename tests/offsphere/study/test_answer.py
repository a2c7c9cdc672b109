"""What a study says when it ends: figures by hand, words for every case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from offsphere.study import answer
from offsphere.study.answer import compared, sentence
from offsphere.study.plan import load_study, main_runs


@pytest.fixture
def ended(toy, tmp_path: Path, monkeypatch):
    """A study of the toy script whose runs ended with the numbers of a function."""

    def ended(text: str, value):
        file = tmp_path / "s.yaml"
        file.write_text(f"script: toy\nmetric: test/score\n{text}\n")
        study = load_study(file, toy.SCRIPTS)
        runs = main_runs(study, toy.SCRIPTS, str(tmp_path), lambda tune, _: tune.candidates[0])
        found = {run.path: value(run.config) for run in runs}
        monkeypatch.setattr(
            answer, "metrics_of", lambda path: {"test/score": found[path]} if found[path] else {}
        )
        return study, runs

    return ended


SEEDS = [0, 42, 1337, 1, 2]
NOISE = dict(zip(SEEDS, [0.01, -0.02, 0.015, 0.0, -0.005], strict=True))


def test_means_and_paired_differences_are_those_of_scipy(ended):
    def value(config):
        return (
            0.5
            + NOISE[config.seed] * (2 if config.cell == "dot" else 1)
            - 0.1 * (config.cell == "dot")
        )

    study, runs = ended(f"seeds: {SEEDS}\ngrid: {{cell: [dot, cosine]}}", value)
    cosine, dot = compared(study, runs)
    assert (cosine.level, cosine.difference) == ("cosine", None)
    assert (dot.level, dot.against) == ("dot", "cosine")
    differences = np.array([NOISE[seed] - 0.1 for seed in SEEDS])
    half = stats.t.ppf(0.975, 4) * differences.std(ddof=1) / np.sqrt(5)
    assert dot.difference is not None
    assert dot.difference.value == pytest.approx(differences.mean())
    assert dot.difference.low == pytest.approx(differences.mean() - half)
    *table, said = answer.answer(study, runs)
    assert table[0] == "test/score: mean [95 % interval], and the paired difference"
    low, high = (f"{x:+.4g}" for x in (differences.mean() - half, differences.mean() + half))
    assert table[1].split()[:2] == ["cosine", "0.5"]
    assert table[2].endswith(f"5 seeds  - cosine: -0.1 [{low}, {high}]")
    p = stats.ttest_1samp(differences, 0).pvalue
    assert said == (
        f"dot is below cosine in test/score: -0.1 [{low}, {high}], 5 seeds, "
        f"p = {p:.2g}; 1 of 1 can be told from 0."
    )


def test_what_cannot_be_told_says_how_many_seeds_are_missing(ended):
    def value(config):
        return 0.5 + (NOISE[config.seed] + 0.004) * (config.cell == "dot")

    study, runs = ended(f"seeds: {SEEDS}\ngrid: {{cell: [cosine, dot]}}", value)
    said = sentence("test/score", compared(study, runs))
    assert said.startswith("No difference in test/score can be told from 0: the nearest is dot - ")
    assert said.endswith(" more seeds would show it (80 % power).")


def test_contexts_arms_tuned_settings_and_missing_runs(ended):
    text = """
seeds: [0, 1]
grid: {cell: [cosine, dot], batch_size: [8, 16]}
tune: {metric: test/score, best: max, seeds: [9], grid: {lr: [0.1, 0.3]}}"""
    study, runs = ended(text, lambda c: None if (c.cell, c.seed) == ("dot", 1) else 1.0 + c.seed)
    rows = compared(study, runs)
    assert [(row.context, row.level, len(row.values)) for row in rows] == [
        ("batch_size 8", "cosine", 2),
        ("batch_size 8", "dot", 1),
        ("batch_size 16", "cosine", 2),
        ("batch_size 16", "dot", 1),
    ]
    assert sentence("test/score", rows).startswith("Nothing can be compared yet: ")
    text = "seeds: [0, 1, 2]\narms: {plain: {}, slow: {lr: 0.01, steps: 9}}"
    study, runs = ended(text, lambda c: 1.0 + c.seed / 10 - (c.lr < 0.1))
    assert [(r.context, r.level, r.against) for r in compared(study, runs)] == [
        ("", "plain", ""),
        ("", "slow", "plain"),
    ]
    # The same in every seed: a t-test does not exist, three seeds cannot be sure.
    assert "-1 in every seed" in list(answer.answer(study, runs))[2]


def test_what_one_part_tunes_is_a_setting_of_the_others(ended):
    text = """
parts:
  - {name: given, seeds: [0, 1], grid: {lr: [0.1, 0.3], batch_size: [8, 16]}, arms: {set: {}}}
  - name: tuned
    seeds: [0, 1]
    grid: {batch_size: [8]}
    arms: {tuned: {steps: 9}}
    tune: {metric: test/score, best: max, seeds: [9], grid: {lr: [0.2]}}"""
    study, runs = ended(text, lambda c: 10 * c.lr + c.seed * c.batch_size)
    rows = compared(study, runs)
    assert {(row.context, row.level): row.values for row in rows} == {
        ("arm set, batch_size 8", "lr 0.1"): {0: 1.0, 1: 9.0},
        ("arm set, batch_size 8", "lr 0.3"): {0: 3.0, 1: 11.0},
        ("arm set, batch_size 16", "lr 0.1"): {0: 1.0, 1: 17.0},
        ("arm set, batch_size 16", "lr 0.3"): {0: 3.0, 1: 19.0},
        ("arm tuned, batch_size 8", "lr None"): {0: 2.0, 1: 10.0},
    }
    assert sum(row.difference is not None for row in rows) == 2


def test_without_a_metric_or_a_number_it_says_so(ended):
    study, runs = ended("seeds: [0]", lambda c: None)
    assert list(answer.answer(study, runs)) == ["No finished run has test/score."]
    without = replace(study, metric=None)
    assert "names no `metric:`" in next(answer.answer(without, runs))
