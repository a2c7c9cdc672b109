"""The cells: corners, learnable inside, invariants, and the propositions of the 2x2 paper."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere import losses
from offsphere.cells import CELLS, Cell, calibration_ratio, shrink
from offsphere.names import CORNERS


def sides(n=9, m=None, d=5, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    left = torch.randn(n, d, generator=g, dtype=torch.float64)
    right = torch.randn(m or n, d, generator=g, dtype=torch.float64)
    left = left * torch.exp(torch.randn(n, 1, generator=g, dtype=torch.float64))
    right = right * torch.exp(torch.randn(m or n, 1, generator=g, dtype=torch.float64))
    return left.to(dtype), right.to(dtype)


def cosines(left, right):
    norms = left.norm(dim=1)[:, None] * right.norm(dim=1)
    return (left @ right.T) / norms


def test_scores_of_the_corners_are_the_papers_definitions():
    left, right = sides(4, 6)
    theta, q, d = cosines(left, right), left.norm(dim=1)[:, None], right.norm(dim=1)
    expected = {"cosine": theta, "qnorm": d * theta, "dnorm": q * theta, "dot": q * d * theta}
    for name, want in expected.items():
        torch.testing.assert_close(Cell(name).scores(left, right), want, rtol=1e-12, atol=1e-12)


def test_any_pair_of_exponents():
    left, right = sides()
    want = cosines(left, right) * left.norm(dim=1)[:, None] ** 0.7 * right.norm(dim=1) ** 0.3
    for cell in (Cell(exponents=(0.3, 0.7)), Cell("0.3,0.7"), Cell(" 0.3, 0.7")):
        assert cell.name == "0.3,0.7"
        torch.testing.assert_close(cell.scores(left, right), want, rtol=1e-12, atol=1e-12)
    assert [Cell(exponents=pair).name for pair in CORNERS.values()] == list(CORNERS)


def test_dot_returns_its_input_bit_for_bit():
    left, right = sides(dtype=torch.bfloat16)
    a, b = Cell("dot")(left, right)
    assert a is left
    assert b is right


def test_equal_sides_stay_one_tensor_only_where_they_are_equal_by_definition():
    z, _ = sides()
    for name in CELLS:
        a, b = Cell(name)(z, z)
        assert (a is b) == (name in ("cosine", "dot"))
        torch.testing.assert_close(a @ b.T, Cell(name).scores(z, z.clone()), rtol=1e-12, atol=1e-12)


def test_learnable_starts_in_the_middle_and_draws_no_random_numbers():
    before = torch.get_rng_state()
    cell = Cell("learnable")
    assert torch.equal(before, torch.get_rng_state())
    assert [g.item() for g in cell.exponents] == [0.5, 0.5]
    assert sum(p.numel() for p in cell.parameters()) == 2
    assert not list(Cell("cosine").parameters())


def test_names_of_other_lanes_are_aliases():
    assert [Cell(x).name for x in ("imgnorm", "txtnorm", "s1norm", "S2Norm")] == [
        "qnorm",
        "dnorm",
        "qnorm",
        "dnorm",
    ]


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_vectors_are_finite_in_value_and_gradient(name, dtype):
    left, right = sides(dtype=dtype)
    left[2], right[2], right[5] = 0.0, 0.0, 0.0
    left.requires_grad_()
    right.requires_grad_()
    cell = Cell(name).to(dtype)
    shrunk = cell(left, right)
    assert all((x[2] == 0).all() for x in shrunk)
    losses.info_nce(*shrunk, 0.1).backward()
    for grad in (left.grad, right.grad, *(p.grad for p in cell.parameters())):
        assert torch.isfinite(grad).all()


def test_norms_are_taken_in_float32_under_half_precision():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # the squares overflow in float16
    unit = shrink(x, 1.0)
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit, torch.full((1, 4), 0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        left, right = sides(dtype=torch.float32)
        shrunk = Cell("cosine")(left, right)[0]
    assert shrunk.dtype == torch.float32
    torch.testing.assert_close(shrunk.norm(dim=1), torch.ones(9), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CELLS)
def test_gradients_by_finite_differences(name):
    left, right = sides(4, 4, 3)
    cell = Cell(name).double()
    inputs = (left.requires_grad_(), right.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: cell(a, b), inputs)
    if name == "learnable":

        def of_logits(logits):
            g = torch.sigmoid(logits)
            return shrink(left, g[0]), shrink(right, g[1])

        assert torch.autograd.gradcheck(
            of_logits, torch.tensor([0.3, -0.2]).double().requires_grad_()
        )


positive = st.floats(1e-3, 1e3)


@given(st.integers(0, 10**6), positive, positive)
@settings(max_examples=50, deadline=None)
def test_cosine_is_scale_free_and_dot_bilinear(seed, a, b):
    left, right = sides(5, 7, 4, seed)
    cosine, dot = Cell("cosine"), Cell("dot")
    torch.testing.assert_close(
        cosine.scores(a * left, b * right), cosine.scores(left, right), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(
        dot.scores(a * left, b * right), a * b * dot.scores(left, right), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(
        dot.scores(left + left.flip(0), right),
        dot.scores(left, right) + dot.scores(left.flip(0), right),
        rtol=1e-9,
        atol=1e-9,
    )


# "Beyond the Unit Hypersphere": the propositions.


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_proposition_4_1_ranking_equivalence(seed):
    """For a fixed query only the candidate's norm can change the ranking."""
    queries, documents = sides(6, 20, 5, seed)
    rank = {name: Cell(name).scores(queries, documents).argsort(1) for name in CORNERS}
    assert torch.equal(rank["cosine"], rank["dnorm"])
    assert torch.equal(rank["qnorm"], rank["dot"])
    by_norm = (documents.norm(dim=1) * cosines(queries, documents)).argsort(1)
    assert torch.equal(rank["dot"], by_norm)


def test_proposition_4_2_gradient_asymmetry_of_dnorm():
    """grad wrt the unit positive document = -(|q|/tau)(1 - p+) q^, and tau_eff = tau/|q|."""
    tau = 0.3
    q, docs = sides(1, 6)
    units = shrink(docs, 1.0).requires_grad_()
    losses.info_nce(q, units, tau, both_ways=False).backward()
    p = torch.softmax((q @ units.detach().T / tau)[0], 0)[0]
    expected = -(q.norm() / tau) * (1 - p) * (q[0] / q.norm())
    torch.testing.assert_close(units.grad[0], expected, rtol=1e-10, atol=1e-12)
    cooler = losses.info_nce(shrink(q, 1.0), units.detach(), tau / q.norm(), both_ways=False)
    same = losses.info_nce(q, units.detach(), tau, both_ways=False)
    assert same.item() == pytest.approx(cooler.item(), rel=1e-12)


@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-3, 3))
@settings(max_examples=30, deadline=None)
def test_proposition_t_1_normalisation_gradient(seed, a, b):
    """ds/dg_q = -ln|q| s and ds/dg_d = -ln|d| s."""
    q, d = sides(1, 1, 5, seed)
    g = torch.sigmoid(torch.tensor([a, b], dtype=torch.float64)).requires_grad_()
    score = (shrink(q, g[0]) * shrink(d, g[1])).sum()
    (grad,) = torch.autograd.grad(score, g)
    logs = torch.stack([q.norm().log(), d.norm().log()])
    torch.testing.assert_close(grad, -logs * score.detach(), rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_proposition_t_2_ranking_depends_on_the_candidate_exponent_only(seed, g_q, other, g_d):
    queries, documents = sides(6, 20, 5, seed)
    one = Cell(exponents=(g_q, g_d)).scores(queries, documents).argsort(1)
    two = Cell(exponents=(other, g_d)).scores(queries, documents).argsort(1)
    by = (documents.norm(dim=1) ** (1 - g_d) * cosines(queries, documents)).argsort(1)
    assert torch.equal(one, two)
    assert torch.equal(one, by)


# Calibration.


def plain_spread(scores, keep):
    rows = [row[k].std(correction=0) for row, k in zip(scores, keep, strict=True)]
    cols = [col[k].std(correction=0) for col, k in zip(scores.T, keep.T, strict=True)]
    return (torch.stack(rows).mean() + torch.stack(cols).mean()) / 2


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("layout", ["pairs", "views", "queue", "one_sided"])
def test_calibration_ratio_is_the_ratio_of_row_spreads(name, layout):
    columns = 55 if layout in ("queue", "one_sided") else 40
    left, right = sides(40, columns, 6, seed=2, dtype=torch.float32)
    # One-sided: no negatives on diagonals on one side of the first, which the columns see reversed.
    exclude = {"pairs": (0,), "views": (0, 20, -20), "queue": (), "one_sided": (0, 7, 15)}[layout]
    keep = torch.ones(len(left), len(right), dtype=torch.bool)
    for offset in exclude:
        keep.diagonal(offset).fill_(False)
    cell = Cell(name)
    want = plain_spread(cell.scores(left, right).detach(), keep) / plain_spread(
        Cell("cosine").scores(left, right), keep
    )
    got = calibration_ratio(cell, left, right, exclude=exclude)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    assert name != "cosine" or got.item() == 1.0


def test_calibration_slabs_cover_any_size():
    left, right = sides(1500, 1500, 3, dtype=torch.float32)
    keep = ~torch.eye(1500, dtype=torch.bool)
    want = plain_spread(left @ right.T, keep) / plain_spread(cosines(left, right), keep)
    assert calibration_ratio(Cell("dot"), left, right).item() == pytest.approx(
        want.item(), rel=1e-4
    )


def test_calibration_refuses_a_constant_encoder():
    with pytest.raises(ValueError, match="scale=fixed"):
        calibration_ratio(Cell("dot"), torch.ones(5, 3), torch.ones(5, 3))


# Bad input.


@pytest.mark.parametrize(
    ("name", "hint"), [("cosin", "cosine"), ("Dnormm", "dnorm"), ("txtnor", "txtnorm")]
)
def test_unknown_cell_names_the_nearest(name, hint):
    with pytest.raises(ValueError, match=f"Unknown cell {name!r}.*Did you mean '{hint}'"):
        Cell(name)


@pytest.mark.parametrize("name", ["", "1,2,3", "0.5", "a,b", "nan,1", "0,inf"])
def test_malformed_exponents_are_refused(name):
    with pytest.raises(ValueError, match="cell|exponent"):
        Cell(name)


def test_mismatched_widths_and_integers_are_refused():
    with pytest.raises(ValueError, match="one width"):
        Cell("dot")(torch.randn(3, 4), torch.randn(3, 5))
    with pytest.raises(ValueError, match="floating-point"):
        Cell("dot")(torch.ones(3, 4, dtype=torch.int64), torch.randn(3, 4))
    with pytest.raises(ValueError, match="finite exponents"):
        Cell(exponents=(math.nan, 0.0))
