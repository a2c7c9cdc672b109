"""SciFact itself, where it lies beside the clone: metrics and rankings of real texts."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import pytrec_eval
import torch
from sklearn.metrics import ndcg_score

from offsphere.cells import Cell
from offsphere.evaluation.ranking import outcomes, rank
from text.lexical import bm25
from text.pairs import make_task
from text.passages import beir_folder

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "scifact"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there")


@pytest.fixture(scope="module")
def task():
    return make_task(beir_folder(FOLDER), "query", "test")


def hashed(texts: list[str], width: int = 64) -> torch.Tensor:
    """Texts as sums of a fixed random vector per word: real overlaps and real lengths."""
    words: dict[str, torch.Tensor] = {}

    def vector(word: str) -> torch.Tensor:
        seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest())
        return torch.randn(width, generator=torch.Generator().manual_seed(seed))

    rows = []
    for text in texts:
        split = text.lower().split()
        for word in split:
            if word not in words:
                words[word] = vector(word)
        rows.append(torch.stack([words[word] for word in split]).sum(0))
    return torch.stack(rows).double()


def by_pytrec_eval(scores: dict[str, dict[str, float]], task) -> dict[str, dict[str, float]]:
    """The library's own call on whole score rows, with MRR from runs cut by hand."""
    truth = {
        str(row): {str(d): grade for d, grade in task.test[q].items()}
        for row, q in enumerate(task.measured)
    }
    whole = pytrec_eval.RelevanceEvaluator(truth, {"ndcg_cut.10", "recall.100"}).evaluate(scores)
    cut = {q: dict(sorted(r.items(), key=lambda x: -x[1])[:10]) for q, r in scores.items()}
    short = pytrec_eval.RelevanceEvaluator(truth, {"recip_rank"}).evaluate(cut)
    return {q: whole[q] | short[q] for q in scores}


def assert_same(found, expected: dict[str, dict[str, float]]) -> None:
    for ours, theirs in (
        ("ndcg10", "ndcg_cut_10"), ("recall100", "recall_100"), ("mrr10", "recip_rank")
    ):  # fmt: skip
        values = [expected[str(row)][theirs] for row in range(len(expected))]
        assert getattr(found, ours).tolist() == pytest.approx(values, abs=1e-9)


def test_every_cells_metrics_are_the_librarys_and_two_and_two_tie(task):
    """Prop. 4.1 and T.2 on real rankings: whole score matrices of each cell, by trec_eval."""
    queries = hashed([task.queries[q] for q in task.measured])
    documents = hashed(task.documents)
    relevant = [task.test[q] for q in task.measured]
    orders, means = {}, {}
    for name, exponent in (("cosine", 1.0), ("dot", 0.0), ("qnorm", 0.0), ("dnorm", 1.0)):
        scores = Cell(name).scores(queries, documents)
        orders[name] = scores.topk(100).indices
        kept = scores.topk(200)
        run = {
            str(row): dict(zip(map(str, items), values, strict=True))
            for row, (items, values) in enumerate(
                zip(kept.indices.tolist(), kept.values.tolist(), strict=True)
            )
        }
        found = outcomes(rank(queries, documents, exponent), relevant)
        assert_same(found, by_pytrec_eval(run, task))
        means[name] = found.means()["ndcg10"]
    assert torch.equal(orders["qnorm"], orders["dot"])
    assert torch.equal(orders["dnorm"], orders["cosine"])
    inside = Cell(exponents=(0.3, 1.0)).scores(queries, documents).topk(100).indices
    assert torch.equal(inside, orders["cosine"])
    assert means["cosine"] > means["dot"] + 0.05  # long abstracts win under dot


def test_bm25_is_worth_what_scikit_learn_and_the_library_say(task):
    asked = [task.queries[q] for q in task.measured]
    ranking = bm25(asked, task.documents, 100)
    found = outcomes(ranking, [task.test[q] for q in task.measured])
    rows = zip(ranking.documents.tolist(), ranking.scores.tolist(), strict=True)
    run = {str(row): dict(zip(map(str, d), s, strict=True)) for row, (d, s) in enumerate(rows)}
    assert_same(found, by_pytrec_eval(run, task))
    assert found.means()["ndcg10"] == pytest.approx(0.6617, abs=5e-4)
    worth = []
    for row, q in enumerate(task.measured):
        truth = torch.zeros(len(task.documents))
        truth[list(task.test[q])] = torch.tensor([float(g) for g in task.test[q].values()])
        places = torch.full((len(task.documents),), -math.inf)
        places[ranking.documents[row]] = -torch.arange(100.0)
        guess = places.masked_fill(places.isinf(), -1000.0)
        worth.append(ndcg_score(truth[None].numpy(), guess[None].numpy(), k=10, ignore_ties=True))
    close = [abs(a - b) < 1e-6 for a, b in zip(worth, found.ndcg10.tolist(), strict=True)]
    assert sum(close) > 0.97 * len(close)  # the rest have equal scores, which trec_eval reorders
