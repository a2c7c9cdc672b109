"""Do norms carry relevance? Closed forms, scipy, and worlds in which the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_vectors import HOW, directions

from offsphere.audit.advice import Evidence, about_relevance
from offsphere.audit.norms import TextFacts, measure_permuted, measure_relevance, measure_texts
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Table
from offsphere.evaluation.geometry import cohens_d
from offsphere.evaluation.intervals import draws
from theory import planted_world as world
from theory.planted_settings import Config

WORDS = Direction("set", "query to document", "query", "right", graded=True, examples="queries")
PLACE = ("set", "query to document")


def test_cohens_d_and_its_intervals_are_those_of_a_slow_reference():
    random = torch.Generator().manual_seed(0)
    documents = directions(60, 8, 1) * (1 + torch.rand(60, 1, generator=random))
    documents[:15] *= 1.3
    pair_query, pair_item = torch.arange(30) % 20, torch.arange(30) % 15
    search = Search(
        WORDS, directions(20, 8, 0), documents, pair_query, pair_item, idle=torch.arange(20, 60)
    )
    table = Table()
    right, idle = measure_relevance(search, HOW, table)
    norms = documents.norm(dim=1)
    assert right.values.tolist() == norms[:15].tolist()
    assert idle.values.tolist() == norms[20:].tolist()
    found = table.get(*PLACE, metric="cohens_d")
    assert found.value == pytest.approx(cohens_d(norms[:15], norms[20:]).item())
    again = []
    for row in torch.cat(list(draws(20, HOW.resamples, HOW.seed))).tolist():
        kept = sorted({int(d) for q, d in zip(pair_query, pair_item, strict=True) if q in row})
        again.append(cohens_d(norms[kept], norms[20:]).item())
    assert (found.low, found.high) == pytest.approx(np.quantile(again, [0.025, 0.975]))
    drawn = np.random.default_rng(HOW.seed)
    pool, null = torch.cat([norms[:15], norms[20:]]), []
    for _ in range(999):
        chosen = torch.zeros(len(pool), dtype=torch.bool)
        chosen[torch.from_numpy(drawn.choice(55, 15, replace=False, shuffle=False))] = True
        null.append(cohens_d(pool[chosen], pool[~chosen]).item())
    permuted = table.get(*PLACE, metric="cohens_d_permuted")
    want = [np.mean(null), *np.quantile(null, [0.005, 0.995])]
    assert [permuted.value, permuted.low, permuted.high] == pytest.approx(want, abs=1e-9)
    p = (1 + sum(abs(x) >= abs(found.value) for x in null)) / 1000
    assert table.value(*PLACE, metric="cohens_d_p") == p


def test_rankings_with_permuted_norms_are_those_of_a_slow_reference():
    random = torch.Generator().manual_seed(0)
    documents = directions(40, 6, 1) * torch.rand(40, 1, generator=random)
    queries, grades = directions(12, 6, 0), torch.tensor([2, 1] * 12)
    pair_query, pair_item = torch.arange(24) // 2, torch.arange(24)
    search, table = Search(WORDS, queries, documents, pair_query, pair_item, grades), Table()
    measure_permuted(search, HOW, table)
    from scipy import stats

    norms, again = documents.norm(dim=1), torch.Generator().manual_seed(HOW.seed)
    unit = (documents / norms[:, None]).numpy()
    discount = 1 / np.log2(np.arange(2, 12))

    def ndcg(lengths: torch.Tensor) -> float:
        scores = queries.numpy() @ (unit * lengths.numpy()[:, None]).T
        gains = np.zeros((12, 40))
        gains[pair_query, pair_item] = grades
        best = np.take_along_axis(gains, np.argsort(-scores, axis=1)[:, :10], 1)
        return ((best * discount).sum(1) / (2 * discount[0] + discount[1])).mean()

    null = [ndcg(norms[torch.randperm(40, generator=again)]) for _ in range(99)]
    found = table.get(*PLACE, "dot", "ndcg10_permuted")
    apart = np.std(null, ddof=1) * np.sqrt(1 + 1 / 99)  # of one more than the 99
    want = [np.mean(null), *stats.t.interval(0.99, 98, np.mean(null), apart)]
    assert [found.value, found.low, found.high] == pytest.approx(want, abs=1e-9)
    p = 2 * stats.t.sf(abs(ndcg(norms) - np.mean(null)) / apart, 98)
    assert table.value(*PLACE, "dot", "ndcg10_permuted_p") == pytest.approx(max(p, 0.001))
    gain = table.get(*PLACE, "dot", "ndcg10_minus_permuted")
    assert gain.value == pytest.approx(ndcg(norms) - np.mean(null), abs=1e-9)


def test_norms_and_texts_correlate_as_scipy_says():
    from scipy import stats

    random = np.random.default_rng(0)
    length = random.integers(3, 40, 200)
    norms = np.sqrt(length) + random.normal(size=200)
    table, facts = Table(), TextFacts(torch.from_numpy(length), torch.ones(200))
    measure_texts(PLACE, "document", torch.from_numpy(norms), facts, table)
    found = table.get(*PLACE, metric="norm_document_with_length")
    assert found.value == pytest.approx(stats.spearmanr(norms, length).statistic)
    drawn = random.integers(0, 200, (2000, 200))
    again = [stats.spearmanr(norms[row], length[row]).statistic for row in drawn]
    assert (found.low, found.high) == pytest.approx(np.quantile(again, [0.025, 0.975]), abs=0.03)
    assert table.get(*PLACE, metric="norm_document_with_frequency") is None  # it does not vary


def said_of_world(carrier: str, task: str, seed: int) -> str:
    """The verdict on fresh documents and queries of an encoder that kept the documents' norms."""
    settings = Config(carrier=carrier, task=task, seed=seed, steps=50)
    random = world.stream(seed, "data")
    mixing = world.draw_mixing(settings, random)
    seen, fresh = (world.draw_corpus(settings, mixing, random) for _ in range(2))
    encoders, _ = world.train_encoders(settings, "qnorm", seen)
    with torch.no_grad():
        queries, documents = encoders.queries(fresh.queries), encoders.documents(fresh.documents)
    search = Search(WORDS, queries, documents, torch.arange(len(queries)), fresh.answer)
    table = Table()
    measure_relevance(search, HOW, table)
    said = about_relevance(Evidence(table, WORDS, "cosine"))
    assert said is not None
    return said.verdict


@pytest.mark.parametrize(
    ("carriers", "least", "most"), [(("norm", "both"), 18, 20), (("angle", "neither"), 0, 1)]
)
def test_planted_worlds_with_and_without_a_signal(carriers, least, most):
    """Twenty worlds of either kind: found in 18 or more, false alarms in at most one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tasks = ("asymmetric", "symmetric")
    said = [said_of_world(carriers[k % 2], tasks[k // 2 % 2], k) for k in range(20)]
    torch.set_num_threads(threads)
    found = sum(verdict.startswith("norms carry relevance") for verdict in said)
    assert least <= found <= most
    assert "norms carry relevance, reversed" not in said
