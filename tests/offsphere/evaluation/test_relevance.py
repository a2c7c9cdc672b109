"""Permuted norms and leverage, written out from the score matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offsphere.cells import Cell
from offsphere.evaluation.ranking import Ranking, outcomes
from offsphere.evaluation.relevance import norm_leverage, permuted_norms
from offsphere.training.streams import stream


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
