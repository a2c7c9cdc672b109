"""int8 and bits beside numpy, and what they cost where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_vectors import HOW, directions

from offsphere.audit.quantised import int8, measure_quantised, signs
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Table

WORDS = Direction("set", "query to document", "query", "right", graded=True, examples="queries")
PLACE = ("set", "query to document")


def test_int8_is_numpys_rounding_of_each_features_range():
    x = directions(50, 6, 0).numpy().astype(np.float32)
    x[:, 3] = 0.5  # a feature that does not vary comes back as it is
    low, high = x.min(0), x.max(0)
    step = np.where(high > low, (high - low) / 255, 1)
    codes = np.round((x - low) / step).astype(np.uint8)
    want = low + codes * step
    assert int8(torch.from_numpy(x)).numpy() == pytest.approx(want, abs=1e-6)
    assert abs(want - x).max() <= (step / 2).max() + 1e-6


def test_bits_score_as_the_hamming_distance():
    q, d = directions(4, 16, 0), directions(9, 16, 1)
    scores = signs(q) @ signs(d).T
    hamming = ((q[:, None] > 0) != (d > 0)).sum(-1)
    assert torch.equal(scores, (16 - 2 * hamming).to(scores.dtype))


def test_costs_are_differences_to_full_precision_under_the_same_cell():
    """Norms alone tell the right document: bits lose it under dot and have nothing under cosine."""
    queries = directions(1, 32, 0).repeat(40, 1)
    documents = directions(1, 32, 0).repeat(80, 1) + 0.01 * directions(80, 32, 2)
    documents[:40] *= torch.linspace(2, 3, 40)[:, None]
    pair_item = torch.full((40,), 39)
    search, table = Search(WORDS, queries, documents, torch.arange(40), pair_item), Table()
    measure_quantised(search, HOW, table)
    assert table.value(*PLACE, "dot", "ndcg10_int8") == 1
    assert table.value(*PLACE, "dot", "ndcg10_int8_minus_full") == 0
    bits = table.get(*PLACE, "dot", "ndcg10_binary")
    change = table.get(*PLACE, "dot", "ndcg10_binary_minus_full")
    assert change.value == pytest.approx(bits.value - 1)
    assert change.high < -0.3
    assert table.value(*PLACE, "cosine", "ndcg10_binary") == bits.value
