"""Scored pairs: scipy's correlation under each cell, bootstrap and permuted norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_vectors import HOW, directions
from scipy import stats

from offsphere.audit.scored import Scored, measure_scored, scored_words
from offsphere.audit.table import Table
from offsphere.evaluation.intervals import draws
from offsphere.names import CORNERS

PLACE = ("set", "vector to vector")


def pairs(rows: int = 120, planted: float = 0.0) -> Scored:
    random = torch.Generator().manual_seed(0)
    left = directions(rows, 8, 0)
    right = left + torch.rand(rows, 1, generator=random) * 2 * directions(rows, 8, 1)
    right = right / right.norm(dim=1, keepdim=True)
    noise = torch.rand(rows, generator=random, dtype=torch.float64)
    score = (left * right).sum(1) + planted * noise
    norms = (0.5 + noise)[:, None]
    return Scored(scored_words("set"), left * norms, right, (score * 5).round())


def test_correlations_and_intervals_are_scipys():
    part, table = pairs(planted=0.5), Table()
    measure_scored(part, HOW, table)
    left, right, gold = (x.numpy() for x in (part.left, part.right, part.score))
    scores = {
        cell: ((left / np.linalg.norm(left, axis=1, keepdims=True) ** a)
               * (right / np.linalg.norm(right, axis=1, keepdims=True) ** b)).sum(1)
        for cell, (a, b) in CORNERS.items()
    }  # fmt: skip
    drawn = torch.cat(list(draws(120, HOW.resamples, HOW.seed))).numpy()

    def again(cell: str) -> np.ndarray:
        return np.array([stats.spearmanr(scores[cell][r], gold[r]).statistic for r in drawn])

    for cell, values in scores.items():
        found = table.get(*PLACE, cell, "spearman")
        assert found.value == pytest.approx(stats.spearmanr(values, gold).statistic)
    found = table.get(*PLACE, "dot", "spearman_minus_cosine")
    ends = np.quantile(again("dot") - again("cosine"), [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx(ends)
    want = stats.spearmanr(scores["dot"], scores["cosine"]).statistic
    assert table.value(*PLACE, "dot", "ranks_with_cosine") == pytest.approx(want)
    products = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    want = stats.spearmanr(products, gold).statistic
    assert table.value(*PLACE, metric="norm_with_score") == pytest.approx(want)


@pytest.mark.parametrize(("planted", "carried"), [(1.0, True), (0.0, False)])
def test_permuted_norms_tell_a_planted_signal_from_none(planted, carried):
    table = Table()
    measure_scored(pairs(planted=planted), HOW, table)
    assert (table.value(*PLACE, "dot", "spearman_permuted_p") <= 0.01) == carried


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"score": torch.zeros(4)}, "at least 4 pairs with finite scores that differ"),
        ({"score": torch.tensor([0, 1, torch.nan, 2])}, "finite scores that differ"),
        ({"score": torch.arange(3.0)}, "4 left vectors, 4 right ones and 3 scores"),
        ({"right": directions(4, 2, 1)}, "of one width, got 3 and 2"),
        ({"left": torch.full((4, 3), torch.inf)}, "4 of 4 left embeddings are not finite"),
    ],
)
def test_what_is_no_scored_pair_is_refused(change, words):
    given = {"left": directions(4, 3, 0), "right": directions(4, 3, 1), "score": torch.arange(4.0)}
    with pytest.raises(ValueError, match=words):
        Scored(scored_words("set"), **{**given, **change})
