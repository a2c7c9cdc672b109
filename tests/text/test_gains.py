"""What compares collections: permuted norms, leverage, the correlation with Cohen's d; packages."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offsphere.cells import Cell
from offsphere.evaluation.ranking import Ranking, outcomes
from offsphere.run.record import run_path
from offsphere.training.streams import stream
from text import passages
from text.gains import BRIEF, norm_leverage, over_collections, permuted_norms
from text.passages import load_collection
from text.train_retrieval import Config, run


def test_permuted_norms_keep_directions_and_the_set_of_norms():
    draw = stream(0, "x")
    queries = torch.randn(9, 4, generator=draw, dtype=torch.float64)
    documents = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    relevant, idle = [{i: 1} for i in range(9)], list(range(20, 30))
    found = permuted_norms(queries, documents, relevant, idle, stream(3, "permute"))
    order = torch.randperm(30, generator=stream(3, "permute"))
    norms = [documents[i].norm().item() for i in order.tolist()]
    moved = torch.stack([d / d.norm() * n for d, n in zip(documents, norms, strict=True)])
    ranking = Ranking(*(queries @ moved.T).sort(descending=True))
    expected = outcomes(ranking, relevant).ndcg10.mean().item()
    assert found["ndcg10_permuted"] == pytest.approx(expected)
    a, b = np.array(norms[:9]), np.array(norms[20:])
    pooled = math.sqrt((a.var(ddof=1) * 8 + b.var(ddof=1) * 9) / 17)
    assert found["cohens_d_permuted"] == pytest.approx((a.mean() - b.mean()) / pooled)
    assert permuted_norms(queries, documents, relevant, [], stream(3, "permute")) == {}


def test_leverage_is_that_of_the_score_matrix():
    draw = stream(1, "x")
    queries = torch.randn(7, 5, generator=draw) + 1
    documents = torch.randn(40, 5, generator=draw) + 0.5
    cosines = Cell("cosine").scores(queries.double(), documents.double())
    norms = documents.double().norm(dim=1).numpy()
    spread = cosines.numpy().std(axis=1).mean()
    expected = norms.std() / norms.mean() * abs(cosines.mean().item()) / spread
    assert norm_leverage(queries, documents) == pytest.approx(expected, rel=1e-6)


def test_the_correlation_over_collections():
    d, gains = [0.1, 0.5, -0.2, 0.9, 0.3], [0.02, 0.01, -0.05, 0.03, 0.0]
    null, lost = [0.0, 0.1, 0.05, -0.1, 0.2], [-0.1, -0.2, -0.1, -0.3, -0.2]
    metrics = {"test/six/ndcg10_scored_dot": 1.0}
    for i in range(5):
        metrics |= {
            f"test/c{i}/cohens_d": d[i],
            f"test/c{i}/ndcg10_scored_cosine": 0.4,
            f"test/c{i}/ndcg10_scored_dot": 0.4 + gains[i],
            f"test/c{i}/cohens_d_permuted": null[i],
            f"test/c{i}/ndcg10_permuted": 0.4 + lost[i],
        }
    names = [*(f"c{i}" for i in range(5)), "six"]
    found = over_collections(metrics, names)
    assert found["test/norm_gain_r"] == pytest.approx(np.corrcoef(d, gains)[0, 1])
    assert found["test/norm_gain_r_permuted"] == pytest.approx(np.corrcoef(null, lost)[0, 1])
    assert found["test/norm_gain_mean"] == pytest.approx(np.mean(gains))
    assert over_collections(metrics, names[1:]) == {}, "four with a Cohen's d are too few"


def docstrings_of(package: str, root: Path, release: str) -> list[list[str]]:
    return [
        [f"{package} name{i}", f"say what {package}{i} makes", f"{package}{i} word{i % 7} " * 20]
        for i in range(60)
    ]


@pytest.fixture
def invented(monkeypatch):
    """Packages whose docstrings are made up, whatever is installed."""
    monkeypatch.setattr(passages, "_installed", lambda package: (Path(package), "1.0"))
    monkeypatch.setattr(passages, "_package_docstrings", docstrings_of)
    passages.docstrings.cache_clear()
    yield
    passages.docstrings.cache_clear()


def test_a_package_is_only_measured_and_each_query_once(invented):
    found, whole = load_collection("package:alpha"), load_collection("docstrings:alpha")
    assert (found.name, whole.name) == ("alpha", "docstrings-alpha")
    assert found.relevant.keys() == {"validation", "test"}
    held, test = found.relevant["validation"], found.relevant["test"]
    assert held.keys().isdisjoint(test)
    assert len(held) + len(test) == len(found.queries) < len(found.documents)
    assert len(test) > 3 * len(held) > 0
    for q, grades in (held | test).items():
        (document,) = grades
        word = found.queries[q].text.split()[2]
        assert found.documents[document].text.startswith(word)


def test_many_collections_in_one_run(invented, collection_folder, tmp_path: Path):
    names = ("alpha", "beta", "gamma", "delta", "epsilon")
    config = Config(
        data=f"beir:{collection_folder}", eval_data=tuple(f"package:{x}" for x in names),
        encoder="static", tokens="words", width=8, batch_size=12, samples=120, threads=1,
        progress=False, out=str(tmp_path), cell="dot",
    )  # fmt: skip
    metrics = run(config)
    examples = load_file(
        run_path(config, script="train_retrieval", out=tmp_path) / "examples.safetensors"
    )
    for name in names:
        found = {k.split("/")[2] for k in metrics if k.startswith(f"test/{name}/")}
        assert found == {*BRIEF, "floor"}
        assert examples[f"{name}/ndcg10"].mean().item() == metrics[f"test/{name}/ndcg10"]
        assert metrics[f"test/{name}/ndcg10"] == metrics[f"test/{name}/ndcg10_scored_dot"]
        assert 0 < metrics[f"bm25/{name}/ndcg10"] <= 1
    assert not any(k.startswith(("bm25_alpha", "untrained_alpha")) for k in examples)
    assert {"norm_document", "untrained_ndcg10", "bm25_ndcg10"} <= examples.keys()
    again = over_collections(metrics, names)
    assert again == {k: metrics[k] for k in metrics if k.startswith("test/norm_gain")}
    assert len(again) == 3
