"""Ranking and its metrics: by hand, against trec_eval's own call, and Prop. 4.1 and T.2."""

from __future__ import annotations

import math

import pytest
import pytrec_eval
import torch
from hypothesis import given
from hypothesis import strategies as st

from offsphere.cells import Cell
from offsphere.evaluation import ranking
from offsphere.evaluation.ranking import Ranking, above_floor, outcomes, rank
from offsphere.evaluation.similarity import CellSimilarity

# Three queries on four documents; the scores are the rankings 2 0 1 3, 3 2 1 0 and 0 1 2 3.
BY_HAND = Ranking(
    torch.tensor([[9.0, 8.0, 7.0, 6.0]]).expand(3, -1),
    torch.tensor([[2, 0, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]]),
)
RELEVANT = [{0: 1}, {3: 1, 0: 2}, {9: 1}]


def test_the_metrics_by_hand():
    found = outcomes(BY_HAND, RELEVANT)
    # Query 1: grade 1 at rank 1 and grade 2 at rank 4; ideal: 2 at rank 1, 1 at rank 2.
    gain = 1 / math.log2(2) + 2 / math.log2(5)
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    assert found.ndcg10.tolist() == pytest.approx([1 / math.log2(3), gain / ideal, 0])
    assert found.recall100.tolist() == [1, 1, 0]
    assert found.mrr10.tolist() == [0.5, 1, 0]
    assert found.means()["mrr10"] == 0.5


def test_the_reciprocal_rank_ends_at_ten_and_recall_at_a_hundred():
    scores = -torch.arange(120.0)[None]
    ranked = Ranking(scores, torch.arange(120)[None])
    for place, mrr, recall in ((9, 0.1, 1), (10, 0, 1), (99, 0, 1), (100, 0, 0)):
        found = outcomes(ranked, [{place: 1}])
        assert found.mrr10.item() == pytest.approx(mrr)
        assert found.recall100.item() == recall


def test_equal_to_the_reference_library_on_many_queries():
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(40, 8, generator=draw)
    documents = torch.randn(200, 8, generator=draw)
    relevant = [
        {int(d): int(g) for d, g in zip(row, grades, strict=True)}
        for row, grades in zip(
            torch.randint(200, (40, 5), generator=draw).tolist(),
            torch.randint(1, 4, (40, 5), generator=draw).tolist(),
            strict=True,
        )
    ]
    scores = (queries @ documents.T).double()
    run = {str(q): {str(d): s for d, s in enumerate(row)} for q, row in enumerate(scores.tolist())}
    truth = {str(q): {str(d): g for d, g in r.items()} for q, r in enumerate(relevant)}
    measures = {"ndcg_cut.10", "recall.100"}
    expected = pytrec_eval.RelevanceEvaluator(truth, measures).evaluate(run)
    found = outcomes(rank(queries, documents, 0.0), relevant)
    for q in range(40):
        assert found.ndcg10[q].item() == pytest.approx(expected[str(q)]["ndcg_cut_10"])
        assert found.recall100[q].item() == pytest.approx(expected[str(q)]["recall_100"])


@given(seed=st.integers(0, 10_000), left=st.floats(-1, 2), right=st.floats(-1, 2))
def test_the_querys_exponent_changes_no_ranking(seed, left, right):
    """Prop. T.2, and 4.1 for the corners: the whole score matrix's order is `rank`'s."""
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(5, 6, generator=draw, dtype=torch.float64) * 10
    documents = torch.randn(20, 6, generator=draw, dtype=torch.float64)
    documents = documents * torch.rand(20, 1, generator=draw, dtype=torch.float64).exp()
    found = rank(queries, documents, right).documents
    for exponents in ((left, right), (0.0, right), (1.0, right)):
        scores = Cell(exponents=exponents).scores(queries, documents)
        assert torch.equal(scores.argsort(dim=1, descending=True), found)


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_ranking_by_a_similarity_is_the_cells_ranking_in_any_tiles(exponent, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    documents = torch.randn(30, 5, generator=draw, dtype=torch.float64) * 3
    expected = rank(queries, documents, exponent)
    monkeypatch.setattr(ranking, "SCORES_AT_ONCE", 3 * 30)
    found = ranking.rank_by(CellSimilarity((0.0, exponent)), queries, documents)
    assert torch.equal(found.documents, expected.documents)
    torch.testing.assert_close(found.scores, expected.scores)


def test_the_floor_is_two_standard_errors():
    untrained = torch.zeros(4)
    gain = torch.tensor([0.0, 0.2, 0.2, 0.4])
    # mean 0.2, std 0.1633, standard error 0.0816: above twice that by a little.
    assert above_floor(gain, untrained)
    assert not above_floor(gain - 0.04, untrained)
    assert not above_floor(torch.tensor([1.0]), torch.tensor([0.0]))


@pytest.mark.parametrize(
    ("relevant", "message"),
    [
        ([{0: 1}], r"each of 3 queries, got 1"),
        ([{0: 1}, {}, {}], r"2 queries have no relevant document \(first: query 1\)"),
    ],
)
def test_refusals(relevant, message):
    with pytest.raises(ValueError, match=message):
        outcomes(BY_HAND, relevant)
