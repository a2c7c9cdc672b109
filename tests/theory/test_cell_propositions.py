"""The propositions of "Beyond the Unit Hypersphere" on the suite's own cells and losses."""

import math

import pytest
import torch
from torch import Tensor

from offsphere.cells import Cell, shrink
from offsphere.losses import info_nce, siglip, spectral
from offsphere.names import CORNERS

CASES = 1000
TEMPERATURE = 0.3


def sides(n: int, m: int, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random directions with norms over two orders of magnitude."""
    draw = torch.Generator().manual_seed(seed)

    def side(rows: int) -> Tensor:
        x = torch.randn(rows, d, dtype=torch.float64, generator=draw)
        return x * 10 ** (2 * torch.rand(rows, 1, dtype=torch.float64, generator=draw) - 1)

    return side(n), side(m)


def ranking(cell: Cell, left: Tensor, right: Tensor) -> Tensor:
    return cell.scores(left, right).argsort(dim=1)


def test_proposition_4_1_only_the_document_s_norm_can_change_a_ranking():
    queries, documents = sides(CASES, 20)
    names = ("cosine", "dnorm", "qnorm", "dot")
    by_cell = {name: ranking(Cell(name), queries, documents) for name in names}
    assert torch.equal(by_cell["cosine"], by_cell["dnorm"])
    assert torch.equal(by_cell["qnorm"], by_cell["dot"])
    cosine = torch.cosine_similarity(queries[:, None], documents[None], dim=-1)
    assert torch.equal(by_cell["dnorm"], cosine.argsort(dim=1))
    assert torch.equal(by_cell["qnorm"], (documents.norm(dim=1) * cosine).argsort(dim=1))


def test_proposition_4_2_a_query_s_norm_divides_its_temperature():
    queries, documents = sides(50, 50, seed=1)
    left, right = Cell("dnorm")(queries, documents)
    loss = info_nce(left, right, TEMPERATURE, both_ways=False)
    cosine = Cell("cosine").scores(queries, documents)
    logits = cosine / (TEMPERATURE / queries.norm(dim=1, keepdim=True))
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(50))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_proposition_4_2_the_positive_s_gradient_grows_with_the_query_s_norm():
    queries, documents = sides(CASES, CASES * 8, seed=2)
    for query, candidates in zip(queries, documents.view(CASES, 8, -1), strict=True):
        left, right = Cell("dnorm")(query[None], candidates)
        right = right.detach().requires_grad_()
        info_nce(left, right, TEMPERATURE, both_ways=False).backward()
        p = (left @ right.T / TEMPERATURE).softmax(1)[0, 0].item()
        norm = query.norm()
        expected = -(norm / TEMPERATURE) * (1 - p) * query / norm
        assert right.grad is not None
        torch.testing.assert_close(right.grad[0], expected, rtol=1e-8, atol=1e-10)


def test_corollary_6_1_only_cosine_and_dot_are_symmetric():
    a, b = sides(CASES, CASES, seed=3)
    cosine = torch.cosine_similarity(a, b)
    lengths = {"left": a.norm(dim=1), "right": b.norm(dim=1)}
    gap = {
        name: torch.linalg.vecdot(*Cell(name)(a, b)) - torch.linalg.vecdot(*Cell(name)(b, a))
        for name in CORNERS
    }
    expected = (lengths["right"] - lengths["left"]) * cosine
    torch.testing.assert_close(gap["qnorm"], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gap["dnorm"], -expected, rtol=1e-10, atol=1e-12)
    assert gap["cosine"].abs().max() < 1e-14
    assert gap["dot"].abs().max() < 1e-12
    equal = b * (lengths["left"] / lengths["right"])[:, None]
    one_way, other_way = Cell("qnorm").scores(a, equal), Cell("qnorm").scores(equal, a)
    torch.testing.assert_close(one_way.diagonal(), other_way.diagonal(), rtol=1e-10, atol=1e-12)


def test_proposition_t_1_an_exponent_s_gradient_is_minus_log_norm_times_score():
    q, d = sides(CASES, CASES, seed=4)
    draw = torch.Generator().manual_seed(5)
    g = torch.rand(2, CASES, 1, dtype=torch.float64, generator=draw).requires_grad_()
    score = torch.linalg.vecdot(shrink(q, g[0]), shrink(d, g[1]))
    (gradient,) = torch.autograd.grad(score.sum(), g)
    for side, x in ((0, q), (1, d)):
        expected = -x.norm(dim=1).log() * score
        torch.testing.assert_close(gradient[side, :, 0], expected, rtol=1e-9, atol=1e-12)


def test_proposition_t_1_on_the_learnable_cell():
    q, d = sides(1, 1, seed=6)
    cell = Cell("learnable").double()
    score = cell.scores(q, d)
    (gradient,) = torch.autograd.grad(score.sum(), cell.logits)
    logs = torch.stack([q.norm().log(), d.norm().log()])
    torch.testing.assert_close(gradient, -0.25 * logs * score.item(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("g_document", [0.0, 0.3, 0.8, 1.0])
def test_proposition_t_2_a_ranking_knows_the_document_s_exponent_only(g_document):
    queries, documents = sides(CASES, 20, seed=7)
    cosine = torch.cosine_similarity(queries[:, None], documents[None], dim=-1)
    expected = (documents.norm(dim=1) ** (1 - g_document) * cosine).argsort(dim=1)
    for g_query in (0.0, 0.4, 1.0):
        cell = Cell(exponents=(g_query, g_document))
        assert torch.equal(ranking(cell, queries, documents), expected)


def test_normalising_has_a_projector_over_the_norm_as_its_derivative():
    for v in sides(20, 1, seed=8)[0]:
        jacobian = torch.autograd.functional.jacobian(lambda x: shrink(x[None], 1.0)[0], v)
        unit = v / v.norm()
        expected = (torch.eye(6, dtype=torch.float64) - torch.outer(unit, unit)) / v.norm()
        torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)
        values = torch.linalg.eigvalsh(expected * v.norm())
        torch.testing.assert_close(values, torch.tensor([0.0] + [1.0] * 5).double())


def test_dot_gradients_of_the_query_and_of_the_relevant_document():
    queries, documents = sides(30, 30, seed=9)
    queries, documents = queries.requires_grad_(), documents.requires_grad_()
    info_nce(queries, documents, TEMPERATURE, both_ways=False).backward()
    p = (queries @ documents.T / TEMPERATURE).softmax(1).detach()
    query_side = (p @ documents - documents) / (30 * TEMPERATURE)
    torch.testing.assert_close(queries.grad, query_side.detach(), rtol=1e-8, atol=1e-10)
    counted = (p - torch.eye(30)).T @ queries / (30 * TEMPERATURE)
    torch.testing.assert_close(documents.grad, counted.detach(), rtol=1e-8, atol=1e-10)


LOSSES = {
    "info_nce": lambda left, right: info_nce(left, right, TEMPERATURE),
    "info_nce_one_way": lambda left, right: info_nce(left, right, TEMPERATURE, both_ways=False),
    "siglip": lambda left, right: siglip(left, right, TEMPERATURE, -1.0),
    "spectral": spectral,
}


def of_scores(name: str, scores: Tensor) -> Tensor:
    """The same losses written out on the matrix of scores."""
    n, logits = len(scores), scores / TEMPERATURE
    if name == "siglip":
        signs = 2 * torch.eye(n, dtype=scores.dtype) - 1
        return -torch.nn.functional.logsigmoid(signs * (logits - 1)).sum() / n
    if name == "spectral":
        squares = (scores**2).sum() - (scores.diagonal() ** 2).sum()
        return squares / (n * (n - 1)) - scores.diagonal().mean()
    rows = torch.nn.functional.cross_entropy(logits, torch.arange(n))
    if name == "info_nce_one_way":
        return rows
    return (rows + torch.nn.functional.cross_entropy(logits.T, torch.arange(n))) / 2


@pytest.mark.parametrize("cell", CORNERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_normalised_side_has_no_radial_gradient_and_a_free_side_its_scores_share(loss, cell):
    left, right = (x.requires_grad_() for x in sides(12, 12, seed=10))
    LOSSES[loss](*Cell(cell)(left, right)).backward()
    scores = Cell(cell).scores(left, right).detach().requires_grad_()
    (slope,) = torch.autograd.grad(of_scores(loss, scores), scores)
    for x, exponent, axis in ((left, CORNERS[cell][0], 1), (right, CORNERS[cell][1], 0)):
        assert x.grad is not None
        radial = torch.linalg.vecdot(x.grad, x).detach()
        share = (slope * scores).sum(axis).detach()
        expected = (1 - exponent) * share
        scale = share.abs().max().item()
        assert scale > 1e-3
        assert math.isclose((radial - expected).abs().max().item(), 0, abs_tol=1e-9 * scale)
