"""The variance term and statistics against double loops and exact arithmetic."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from offsphere.variance import mean_square, negative_statistics, negative_variance, spread_out


def sides(m, k, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(m, d, generator=g, dtype=torch.float64),
        torch.randn(k, d, generator=g, dtype=torch.float64),
    )


def loops(u, v, population, paired):
    terms = [
        (u[i] @ v[j] + 1 / (population - 1)) ** 2
        for i in range(len(u))
        for j in range(len(v))
        if not paired or i != j
    ]
    return torch.stack(terms).mean()


# Widths on both sides of the switch between Gram matrices (m >= 2 d) and the product.
@pytest.mark.parametrize(("m", "k", "d"), [(9, 9, 2), (9, 9, 8), (2, 2, 1), (7, 30, 3), (5, 6, 16)])
@pytest.mark.parametrize("population", [2, 10, 50_000])
def test_value_and_gradient_equal_the_double_loop(m, k, d, population):
    u, v = sides(m, k, d)
    for paired in (True, False) if m == k else (False,):
        results = []
        for function in (
            lambda a, b, paired=paired: negative_variance(a, b, population, paired=paired),
            lambda a, b, paired=paired: loops(a, b, population, paired),
        ):
            a, b = u.clone().requires_grad_(), v.clone().requires_grad_()
            value = function(a, b)
            (3 * value).backward()
            results.append((value.detach(), a.grad, b.grad))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("m", "d"), [(12, 3), (5, 9)])
def test_within_view_form(m, d):
    u, _ = sides(m, m, d)
    a, b = u.clone().requires_grad_(), u.clone().requires_grad_()
    negative_variance(a, a, 100).backward()
    want = loops(b, b, 100, paired=True)
    want.backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("keys", "flops"), [(90, (4 * 5 + 2 * 90) * 8**2), (9, 4 * 5 * 9 * 8)])
def test_a_queue_that_takes_no_gradient_costs_none(keys, flops):
    """Gram matrices of both sides and a product with that of the queue; or scores, and one more."""
    u, queue = sides(5, keys, 8)
    u.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        (found,) = torch.autograd.grad(negative_variance(u, queue, 90, paired=False), u)
    (expected,) = torch.autograd.grad(loops(u, queue, 90, paired=False), u)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert counter.get_total_flops() == flops


def test_a_full_simplex_has_no_variance():
    """n unit vectors with all products -1/(n-1): the optimum of Thm 5.1 costs nothing."""
    n = 9
    simplex = F.normalize(torch.eye(n, dtype=torch.float64) - 1 / n)
    assert negative_variance(simplex, simplex, n).item() == pytest.approx(0, abs=1e-15)
    mean, variance = negative_statistics(simplex, simplex)
    assert mean.item() == pytest.approx(-1 / (n - 1), rel=1e-12)
    assert variance.item() == pytest.approx(0, abs=1e-15)


def test_float32_gram_keeps_six_digits():
    u, v = (F.normalize(x) for x in sides(600, 600, 64))
    exact = negative_variance(u, v, 50_000).item()
    assert negative_variance(u.float(), v.float(), 50_000).item() == pytest.approx(exact, rel=1e-5)


def exact_statistics(u, v, paired):
    u = [[Fraction(x) for x in row] for row in u.tolist()]
    v = [[Fraction(x) for x in row] for row in v.tolist()]
    scores = [
        sum(a * b for a, b in zip(x, y, strict=True))
        for i, x in enumerate(u)
        for j, y in enumerate(v)
        if not paired or i != j
    ]
    mean = sum(scores) / len(scores)
    return float(mean), float(sum((s - mean) ** 2 for s in scores) / len(scores))


@pytest.mark.parametrize("spread", [1.0, 1e-4, 1e-7])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("d", [2, 12])
def test_statistics_of_nearly_collapsed_embeddings_keep_their_digits(spread, paired, d):
    u, v = sides(10, 10, d, seed=4)
    centre = F.normalize(torch.ones(d, dtype=torch.float64), dim=0)
    u, v = centre + spread * u, 0.5 * centre + spread * v
    mean, variance = negative_statistics(u, v, paired=paired)
    exact_mean, exact_variance = exact_statistics(u, v, paired)
    assert mean.item() == pytest.approx(exact_mean, rel=1e-13)
    # The inputs' own rounding (1e-16 of 1) is all that may be lost of a spread of 1e-7.
    assert variance.item() == pytest.approx(exact_variance, rel=1e-7)


@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_second_moment_is_variance_plus_squared_distance_to_the_target(m, d, seed):
    u, v = (F.normalize(x) for x in sides(m, m, d, seed))
    mean, variance = negative_statistics(u, v)
    want = variance + (mean + 1 / 99) ** 2
    assert negative_variance(u, v, 100).item() == pytest.approx(want.item(), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(4, 3), torch.randn(4, 3), 1), "population of at least 2, got 1"),
        ((torch.randn(4, 3), torch.randn(5, 3), 9), "paired=False"),
        ((torch.randn(4, 3), torch.randn(4, 2), 9), "one width"),
        ((torch.randn(1, 3), torch.randn(1, 3), 9), "at least one negative"),
        ((torch.ones(4, 3).long(), torch.ones(4, 3).long(), 9), "floating-point"),
    ],
)
def test_refuses_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        negative_variance(*arguments)


def dense_spread_out(u, v, paired):
    """GOR's definition on the list of the negatives' scores."""
    scores = [u[i] @ v[j] for i in range(len(u)) for j in range(len(v)) if not paired or i != j]
    first, second = torch.stack(scores).mean(), torch.stack(scores).square().mean()
    return first**2 + torch.relu(second - 1 / u.shape[1])


# Widths on both sides of the switch between Gram matrices and the product; and near-orthogonal
# rows, whose second moment is below 1/d, so that only the mean counts.
@pytest.mark.parametrize(("m", "k", "d"), [(9, 9, 2), (9, 9, 8), (7, 30, 3), (5, 6, 16)])
@pytest.mark.parametrize("length", [1.0, 0.02])
def test_gor_equals_its_dense_definition_in_value_and_gradient(m, k, d, length):
    u, v = (length * x for x in sides(m, k, d))
    for paired in (True, False) if m == k else (False,):
        results = []
        for function in (
            lambda a, b, paired=paired: spread_out(a, b, paired=paired),
            lambda a, b, paired=paired: dense_spread_out(a, b, paired),
        ):
            a, b = u.clone().requires_grad_(), v.clone().requires_grad_()
            value = function(a, b)
            (3 * value).backward()
            results.append((value.detach(), a.grad, b.grad))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("d", [2, 7])
def test_gor_in_closed_form(d):
    """Orthonormal rows are spread out: 0. Equal unit rows: 1 + (1 - 1/d)."""
    basis = torch.eye(d, dtype=torch.float64)
    assert spread_out(basis, basis).item() == 0
    for rows in (3, 2 * d + 1):
        equal = basis[:1].repeat(rows, 1)
        assert spread_out(equal, equal).item() == pytest.approx(2 - 1 / d, rel=1e-12)


def test_gor_has_second_derivatives():
    u, _ = sides(5, 5, 3)
    u = F.normalize(u).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: spread_out(x, x), u)


def test_gor_equals_the_peer():
    """sentence-transformers' loss of two columns, with its defaults, in value and gradient."""
    peer = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    loss = peer.GlobalOrthogonalRegularizationLoss(model=torch.nn.Identity())
    left, right = (x.requires_grad_() for x in sides(12, 12, 6))
    theirs = sum(loss.compute_loss_from_embeddings([left, right]).values())
    u, v = F.normalize(left), F.normalize(right)
    ours = (spread_out(u, u) + spread_out(v, v)) / 2
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(value, [left, right]) for value in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", [mean_square, spread_out])
def test_groups_must_be_aligned_and_fill_the_batch(function):
    u, v = sides(6, 6, 3)
    for how in ({"group": 4}, {"group": 1}, {"group": 3, "paired": False}):
        with pytest.raises(ValueError, match="that fill the batch, got 6 and 6 rows"):
            function(u, v, **how)
