"""An audit of plain arrays, without any model, beside the text lane's own evaluation of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from offsphere.audit.measures import Side
from offsphere.audit.output import show_report, write_report
from offsphere.audit.report import Data, audit
from offsphere.audit.scoring import How
from offsphere.audit.search import Direction, Search
from offsphere.evaluation.geometry import hubness, norm_statistics
from offsphere.evaluation.ranking import outcomes, rank
from offsphere.evaluation.relevance import norm_leverage
from offsphere.names import CORNERS

HOW = How(dict(CORNERS), "dot", resamples=100)
WORDS = Direction(
    "collection", "query to document", "query", "right", graded=True, examples="queries"
)
PLACE = ("collection", "query to document")


def collection(queries: int = 150, documents: int = 400, planted: float = 1.0):
    """float32 arrays; documents that some query wants are `planted` times as long as others."""
    random = np.random.default_rng(0)
    wanted = np.arange(queries)
    documents_ = random.normal(size=(documents, 16)).astype(np.float32)
    asked = documents_[wanted] + 1.4 * random.normal(size=(queries, 16)).astype(np.float32)
    documents_ /= np.linalg.norm(documents_, axis=1, keepdims=True)
    documents_ *= random.uniform(0.9, 1.1, (documents, 1))
    documents_[wanted] *= planted
    return asked, documents_.astype(np.float32), wanted


def audited(planted: float):
    asked, documents, wanted = collection(planted=planted)
    search = Search(WORDS, asked, documents, np.arange(len(asked)), wanted)
    sides = {"query": Side(search.queries), "document": Side(search.items)}
    return audit("vectors", "unknown", [Data("150 queries.", sides, [search])], HOW)


def test_arrays_without_a_model_have_the_text_lanes_numbers():
    report = audited(planted=1.5)
    asked, documents, wanted = (torch.as_tensor(x) for x in collection(planted=1.5))
    relevant = [{int(row): 1} for row in wanted]
    for cell, (_, g) in CORNERS.items():
        want = outcomes(rank(asked, documents, g), relevant).means()
        for metric, value in want.items():
            assert report.table.value(*PLACE, cell, metric) == pytest.approx(value, abs=1e-12)
        hubs = hubness(asked, documents, 10, item_exponent=g)
        for kind in ("skewness", "norm_correlation"):
            found = report.table.value(*PLACE, cell, f"hubness_{kind}")
            assert found == pytest.approx(hubs[kind].item(), abs=1e-5)
    leverage = norm_leverage(asked, documents)
    assert report.table.value(*PLACE, metric="norm_leverage") == pytest.approx(leverage, rel=1e-9)
    for side, x in (("query", asked), ("document", documents)):
        cv = norm_statistics(x)["cv"].item()
        assert report.table.value(*PLACE, metric=f"norm_{side}_cv") == pytest.approx(cv, rel=1e-5)


@pytest.mark.parametrize(("planted", "verdict"), [(1.5, "use magnitude"), (0.7, "keep cosine")])
def test_a_planted_signal_is_found(planted, verdict):
    report = audited(planted)
    assert report.advice[0].statements[0].verdict == verdict


def test_what_is_written_and_shown_is_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    report = audited(1.5)
    write_report(tmp_path, report)
    show_report(report, tmp_path)
    said = capsys.readouterr().out
    assert said.startswith(report.headline[:60])
    assert f"{report.table.value(*PLACE, 'dot', 'ndcg10'):.1%}" in said
    content = json.loads((tmp_path / "audit.json").read_text())
    assert len(content["table"]) == len(report.table)
    assert (tmp_path / "results.csv").read_bytes() == report.table.csv()
    assert report.headline in (tmp_path / "audit.html").read_text().replace("&#39;", "'")
