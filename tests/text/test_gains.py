"""What compares collections: permuted norms, leverage, the correlation with Cohen's d; packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from offsphere.run.record import run_path
from text import passages
from text.gains import BRIEF, over_collections
from text.passages import load_collection
from text.train_retrieval import Config, run


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


def docstrings_of(package: str) -> list[list[str]]:
    return [
        [f"{package} name{i}", f"say what {package}{i} makes", f"{package}{i} word{i % 7} " * 20]
        for i in range(60)
    ]


@pytest.fixture
def invented(monkeypatch):
    """Packages whose docstrings are made up, whatever is installed."""
    monkeypatch.setattr(passages, "package_docstrings", lambda name: ("1.0", docstrings_of(name)))
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
