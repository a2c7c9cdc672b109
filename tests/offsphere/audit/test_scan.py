"""Lists of a pass over blocks are those of all products in float64."""

from __future__ import annotations

import pytest
import torch

from offsphere.audit.scan import scan
from offsphere.evaluation.ranking import rank


def sides(queries: int, documents: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(queries)
    q = torch.randn(queries, width, generator=random)
    d = torch.randn(documents, width, generator=random)
    return q, d * torch.rand(documents, 1, generator=random)


def blocks(rows: int, x: torch.Tensor):
    return lambda: ((s, x[s : s + rows]) for s in range(0, len(x), rows))


@pytest.mark.parametrize(
    ("queries", "documents", "width", "rows"),
    [
        (7, 30, 4, 11),
        (300, 5000, 64, 777),
        (50, 130, 8, 60),
        (2100, 900, 16, 900),
        (3, 1, 5, 4),
        (9, 124, 8, 63),
    ],
)
def test_lists_are_those_of_float64(queries, documents, width, rows):
    q, d = sides(queries, documents, width)
    found = scan(q, blocks(rows, d), (0.0, 1.0, 0.3), 100)
    for exponent, best in found.items():
        want = rank(q.double(), d.double(), exponent)
        assert torch.equal(best.documents, want.documents)
        torch.testing.assert_close(best.scores, want.scores, rtol=1e-12, atol=1e-14)


def test_what_float32_cannot_tell_apart_is_told_apart():
    """Documents whose scores differ by a hundredth of float32's resolution, in shuffled order."""
    random = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 64, dtype=torch.float64)
    q[0, 0] = 1
    order = torch.randperm(20, generator=random)
    d = torch.randn(500, 64, generator=random, dtype=torch.float64) * 0.01
    d[100:120, 0] = 1 + 1e-9 * order.double()
    best = scan(q, blocks(64, d), (0.0,), 20)[0.0]
    assert best.documents[0].tolist() == (100 + order.argsort(descending=True)).tolist()


def test_the_first_of_equals_beyond_the_spare_ones_keep_their_scores():
    q, d = torch.ones(2, 3), torch.ones(200, 3)
    best = scan(q, blocks(50, d), (1.0,), 10)[1.0]
    assert best.documents.shape == (2, 10)
    torch.testing.assert_close(best.scores, torch.full((2, 10), 3**0.5, dtype=torch.float64))
    assert all(len(set(row)) == 10 for row in best.documents.tolist())
