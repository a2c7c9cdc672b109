"""The theorems on similarities at the optimum, with a number each."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from offsphere import losses
from offsphere.evaluation.geometry import alignment
from offsphere.variance import negative_variance
from theory import simplex_theorems as theorems
from theory.simplex import (
    Config,
    alignment_and_uniformity,
    fixed_batch_variance,
    monotone_gradients,
    random_partitions,
    run,
    similarity_bound,
    variance_extremes,
)

SIMPLEX_LOSSES = tuple(name for name in theorems.FULL_BATCH_LOSSES if name != "spectral")


def info_nce_family(phi, psi, *, cross, within):
    """Def. 3.1: half of L(u, v) and of L(v, u); `cross` and `within` are the paper's c1 and c2."""

    def one_way(u, v):
        positive = theorems.positives(u, v)[:, None]
        total = cross * phi(theorems.negatives(u, v) - positive).sum(1)
        return psi(total + within * phi(theorems.negatives(u, u) - positive).sum(1)).mean()

    return lambda u, v: (one_way(u, v) + one_way(v, u)) / 2


def separates_in_excess(phi, psi, n):
    """Thm 5.3's condition on an additive loss without within-view negatives, at d >= n."""
    return theorems._slope(phi, 1.0) < (n - 2) / (2 * (n - 1)) * theorems._slope(psi, -1 / (n - 1))


def opposed_simplices(n, x):
    """Two copies of a simplex moved apart along a further axis, so that every s_pos is 1 - 2 x."""
    u = torch.nn.functional.pad(theorems.simplex_etf(n), (0, 1)) * math.sqrt(1 - x)
    v = u.clone()
    u[:, -1], v[:, -1] = math.sqrt(x), -math.sqrt(x)
    return u, v


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_simplex_etf_has_the_simplex_gram(n):
    corners = theorems.simplex_etf(n)
    expected = (n * torch.eye(n, dtype=torch.float64) - 1) / (n - 1)
    torch.testing.assert_close(corners @ corners.T, expected, rtol=0, atol=1e-14)
    assert corners.shape == (n, n - 1)


@pytest.mark.parametrize(
    ("name", "psi", "cross", "within"),
    [
        ("info_nce", torch.log1p, 1, 0),
        ("nt_xent", torch.log1p, 1, 1),
        ("dcl", torch.log, 1, 1),
        ("dhel", torch.log, 0, 1),
    ],
)
def test_library_losses_are_members_of_the_info_nce_family(name, psi, cross, within):
    family = info_nce_family(lambda x: torch.exp(x / 0.3), psi, cross=cross, within=within)
    _same_value_and_gradients(theorems.full_batch_loss(name, 0.3, 0.0), family)


@pytest.mark.parametrize("b", [-2.0, 0.0, 10.0])
def test_siglip_is_additive_with_the_opposite_sign_of_the_bias(b):
    phi, psi = theorems.siglip_functions(6, 4.0, b)
    family = theorems.additive_family(phi, psi, cross=1, within=0)
    _same_value_and_gradients(lambda u, v: losses.siglip(u, v, 1 / 4.0, bias=-b), family)


def test_spectral_is_additive():
    family = theorems.additive_family(lambda x: x, torch.square, cross=1, within=0)
    _same_value_and_gradients(losses.spectral, family)


def _same_value_and_gradients(loss, family):
    u, v = (x.requires_grad_() for x in theorems.random_sides(6, 5, generator()))
    got, expected = loss(u, v), family(u, v)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(got, (u, v)), torch.autograd.grad(expected, (u, v)), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [5, 9])
@pytest.mark.parametrize("name", SIMPLEX_LOSSES)
def test_full_batch_optimum_is_the_simplex(name, width):
    """Thm 5.1, in the fewest dimensions and in more."""
    loss = theorems.full_batch_loss(name, 0.2 if name == "siglip" else 0.5, bias=-5.0)
    u, v = theorems.optimise(loss, *theorems.random_sides(6, width, generator()))
    assert theorems.distance_to_simplex(u, v) < 1e-6


@pytest.mark.parametrize("within", [0, 1])
def test_the_spectral_optimum_is_orthogonal_where_there_is_room(within):
    """psi(x) = x^2 is not increasing below zero, so Thm 5.1 does not hold for it at d >= n."""
    n = 6
    loss = theorems.additive_family(lambda x: x, torch.square, cross=1, within=within)
    u, v = theorems.optimise(loss, *theorems.random_sides(n, n, generator()))
    assert (theorems.positives(u, v) - 1).abs().max() < 1e-6
    assert theorems.negatives(u, v).abs().max() < 1e-6
    corners = theorems.simplex_etf(n)
    at_simplex = loss(corners, corners).item()
    assert at_simplex == pytest.approx(-1 + (1 + within) / (n - 1) ** 2)
    assert loss(u, v).item() == pytest.approx(-1, abs=1e-10)


def test_the_spectral_optimum_is_the_simplex_up_to_signs_in_the_fewest_dimensions():
    n = 6
    u, v = theorems.optimise(losses.spectral, *theorems.random_sides(n, n - 1, generator()))
    assert (theorems.positives(u, v) - 1).abs().max() < 1e-6
    assert (theorems.negatives(u, v).abs() - 1 / (n - 1)).abs().max() < 1e-5


def test_the_bound_holds_and_is_attained():
    """Thm 5.2 over 1,000 cases; the slack is a sum of three squares."""
    metrics = similarity_bound(1000, generator())
    assert metrics["bound/cases"] == 1000
    assert metrics["bound/smallest_slack"] > -1e-14
    assert metrics["bound/decomposition_error"] < 1e-13
    assert metrics["bound/slack_at_equality"] == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("x", [0.0, 0.3, 1.0])
def test_views_moved_apart_keep_a_slack(x):
    """No spread of u - v and E[u + v] = 0, yet no equality: E[u - v] must be zero as well."""
    n = 7
    u, v = opposed_simplices(n, x)
    parts = theorems.slack_parts(u, v)
    assert parts == pytest.approx((0, x * n / (n - 1), 0), abs=1e-14)
    assert theorems.slack(u, v) == pytest.approx(x * n / (n - 1), abs=1e-14)


def test_siglip_condition_and_threshold():
    """Example 5.4 as it is printed, with t = b = 10, on both sides of the threshold."""

    def printed(n, t=10, b=10):
        return (1 + math.exp(t / (n - 1) + b)) / (1 + math.exp(t - b)) < (n - 2) / 2

    threshold = theorems.siglip_threshold(10, 10)
    assert threshold == 22_040
    assert not printed(threshold - 1)
    assert printed(threshold)
    assert all(theorems.siglip_separates_in_excess(n, 10, 10) for n in (32_768, 50_000))


@settings(deadline=None, max_examples=1000)
@given(n=st.integers(2, 100_000), scale=st.floats(0.5, 20), b=st.floats(-15, 15, allow_nan=False))
def test_example_5_4_is_thm_5_3_for_siglip(n, scale, b):
    margin = (
        math.log1p(math.exp(scale / (n - 1) + b))
        - math.log1p(math.exp(scale - b))
        - (math.log((n - 2) / 2) if n > 2 else -math.inf)
    )
    if abs(margin) > 1e-9:
        phi, psi = theorems.siglip_functions(n, scale, b)
        expected = margin < 0
        assert separates_in_excess(phi, psi, n) == expected
        assert theorems.siglip_separates_in_excess(n, scale, b) == expected


@pytest.mark.parametrize("b", [-2.0, 0.0, 2.0, 2.7, 2.8, 5.0])
def test_excessive_separation_and_its_cure(b):
    """Thm 5.3: SigLIP lands where the one-variable problem says; with c2 = 1 on the simplex."""
    n = 8
    phi, psi = theorems.siglip_functions(n, 5.0, b)
    start = theorems.random_sides(n, n, generator())
    s_pos, s_neg = theorems.additive_optimum(phi, psi, n)
    u, v = theorems.optimise(theorems.additive_family(phi, psi, cross=1, within=0), *start)
    assert (theorems.positives(u, v) - s_pos).abs().max() < 1e-5
    assert (theorems.negatives(u, v) - s_neg).abs().max() < 1e-5
    excessive = separates_in_excess(phi, psi, n)
    assert excessive == (b < 2.75)
    assert (s_pos < 1 and s_neg < -1 / (n - 1)) == excessive
    cured = theorems.optimise(theorems.additive_family(phi, psi, cross=1, within=1), *start)
    assert theorems.distance_to_simplex(*cured) < 1e-5


@pytest.mark.parametrize(("n", "scale", "b"), [(5, 5.0, 0.0), (40, 10.0, 1.0), (9, 3.0, -9.0)])
def test_additive_optimum_is_attained_and_the_best_of_its_family(n, scale, b):
    phi, psi = theorems.siglip_functions(n, scale, b)
    loss = theorems.additive_family(phi, psi, cross=1, within=0)
    s_pos, s_neg = theorems.additive_optimum(phi, psi, n)
    u, v = opposed_simplices(n, (1 - s_pos) / 2)
    torch.testing.assert_close(theorems.positives(u, v), torch.full((n,), s_pos).double())
    assert (theorems.negatives(u, v) - s_neg).abs().max() < 1e-12
    best = minimize_scalar(
        lambda x: loss(*opposed_simplices(n, x)).item(), bounds=(0, 1), method="bounded"
    )
    assert loss(u, v).item() <= best.fun + 1e-12


@pytest.mark.parametrize(("n", "m"), [(4, 2), (12, 4), (12, 3), (60, 10)])
def test_variance_extremes_are_attained(n, m):
    """Thm 5.5: every pair's similarity, counted one by one, against the printed bounds."""
    least = (n - m) / ((m - 1) * (n - 1) ** 2)
    ends = (
        (theorems.orthogonal_simplices(n, m), least),
        (theorems.shared_simplices(n, m), n * least),
    )
    assert theorems.variance_band(n, m) == pytest.approx((least, n * least))
    for u, bound in ends:
        pairs = [float(u[i] @ u[j]) for i in range(n) for j in range(n) if i != j]
        mean = math.fsum(pairs) / len(pairs)
        variance = math.fsum((s - mean) ** 2 for s in pairs) / len(pairs)
        assert mean == pytest.approx(-1 / (n - 1), abs=1e-14)
        assert variance == pytest.approx(bound, abs=1e-14)
    assert theorems.orthogonal_simplices(n, m).shape[1] == n // m * (m - 1)
    errors = {k: v for k, v in variance_extremes().items() if k.endswith("error")}
    assert len(errors) == 16
    assert max(errors.values()) < 1e-14


def test_random_optima_of_fixed_batches_stay_inside_the_band():
    """Thm 5.5 over 1,000 cases: every batch on a simplex of its own, turned at random."""
    metrics = random_partitions(1000, generator())
    assert (metrics["partitions/cases"], metrics["partitions/outside_the_band"]) == (1000, 0)
    assert metrics["partitions/mean_error"] < 1e-13


@pytest.mark.parametrize("name", SIMPLEX_LOSSES[:4])
def test_turned_simplices_are_optima_of_fixed_batches(name):
    """No loss of a partition is lower where the search for it ends."""
    loss = theorems.fixed_batches(theorems.full_batch_loss(name, 0.5, 0.0), 3)
    u = theorems.turned_simplices(6, 3, 4, generator(1))
    found = loss(*theorems.optimise(loss, *theorems.random_sides(6, 4, generator())))
    assert loss(u, u).item() == pytest.approx(found.item(), abs=1e-10)


def test_fixed_batches_land_inside_the_band():
    metrics, _ = fixed_batch_variance(Config(population=8), generator())
    for m in (2, 4, 8):
        assert metrics[f"band/{m}/mean_error"] < 1e-6
        plain = metrics[f"band/{m}/plain"]
        assert metrics[f"band/{m}/least"] - 1e-9 <= plain <= metrics[f"band/{m}/largest"] + 1e-9
    for m in (2, 4):
        assert metrics[f"band/{m}/variance_over_all"] < metrics[f"band/{m}/least"] / 10


@pytest.mark.parametrize("weight", [0.3, 30.0])
def test_the_variance_term_draws_a_batch_towards_the_population(weight):
    """A batch of 4 out of 20 lands between -1/3 and -1/19, where the one-variable optimum is."""
    m, n, temperature = 4, 20, 0.5
    base = theorems.full_batch_loss("info_nce", temperature, 0.0)

    def at(s):
        return (
            math.log1p((m - 1) * math.exp((s - 1) / temperature)) + weight * (s + 1 / (n - 1)) ** 2
        )

    expected = minimize_scalar(at, bounds=(-1 / (m - 1), 0.9), method="bounded").x
    assert -1 / (m - 1) < expected < -1 / (n - 1)
    u, v = theorems.optimise(
        lambda u, v: base(u, v) + weight * negative_variance(u, v, n),
        *theorems.random_sides(m, 6, generator()),
    )
    assert (theorems.positives(u, v) - 1).abs().max() < 1e-6
    assert (theorems.negatives(u, v) - expected).abs().max() < 1e-5


@given(b=st.integers(1, 6), m=st.integers(2, 9), factor=st.integers(2, 4))
def test_the_band_falls_with_the_batch_size(b, m, factor):
    small, large = (theorems.variance_band(b * m * factor, size) for size in (m, m * factor))
    assert small[0] > large[0]
    assert small[1] > large[1]


def test_score_gradients_are_the_softmax_weights():
    u, v = theorems.random_sides(5, 3, generator())
    scores = u @ v.T
    rows, columns = (scores / 0.3).softmax(1), (scores / 0.3).softmax(0)
    expected = (rows + columns - 2 * torch.eye(5, dtype=torch.float64)) / (2 * 5 * 0.3)
    torch.testing.assert_close(theorems.score_gradients(scores, 0.3), expected)


def test_smaller_batches_push_negatives_harder():
    """Thm 5.6 over 1,000 nested batches, in both readings of the mini-batch loss."""
    metrics = monotone_gradients(1000, generator())
    assert metrics == {
        "gradient/cases": 1000,
        "gradient/violations_batch_mean": 0,
        "gradient/violations_epoch_mean": 0,
        "gradient/violations_negative": 0,
    }


def test_alignment_and_uniformity_are_moments_of_the_similarities():
    metrics = alignment_and_uniformity(generator())
    assert metrics["uniformity/alignment_error"] < 1e-12
    assert metrics["uniformity/from_moments"] == pytest.approx(
        metrics["uniformity/exact"], abs=1e-3
    )
    u, v = theorems.random_sides(7, 4, generator())
    assert alignment(u, v).item() == pytest.approx(2 - 2 * theorems.positives(u, v).mean().item())


def test_a_run_writes_its_metrics_and_figures(tmp_path):
    config = Config(instances=4, population=4, cases=5, out=str(tmp_path))
    metrics = run(config)
    assert metrics["landing/info_nce/distance"] < 1e-6
    assert metrics["separation/closed_form_error"] < 1e-5
    assert metrics["separation/cured_distance"] < 1e-5
    assert metrics["separation/siglip_threshold_n"] == 22_040
    (folder,) = (tmp_path / "simplex").iterdir()
    written = {file.name for file in folder.iterdir()}
    figures = {
        f"{name}.{form}" for name in ("landing", "separation", "band") for form in ("png", "svg")
    }
    assert figures | {"metrics.json", "config.yaml"} <= written
