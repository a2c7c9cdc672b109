import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import AnovaRM
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from offsphere.analysis.power import (
    inside_power,
    seeds_for_difference,
    smallest_difference,
    t_test_power,
)
from offsphere.analysis.published import published
from offsphere.analysis.stats import (
    contrast,
    correlation,
    crossed,
    equivalence_p,
    estimate,
    holm,
    paired_difference,
    two_by_two,
)

SEEDS = (3, 5, 10)


def two_arms(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    control = rng.normal(0.7, 0.05, n)
    return control + rng.normal(0.01, 0.02, n), control


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_paired_difference_is_scipys_ttest_rel(n, level):
    treated, control = two_arms(n)
    result = paired_difference(treated, control)
    expected = scipy_stats.ttest_rel(treated, control)
    bounds = expected.confidence_interval(level)
    assert result.value == pytest.approx((treated - control).mean(), rel=1e-12)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-10)
    assert result.interval(level) == pytest.approx((bounds.low, bounds.high), rel=1e-10)
    assert (result.low, result.high) == pytest.approx(result.interval(0.95), rel=1e-12)
    assert (result.n, result.dropped, result.method) == (n, 0, "t")


def test_effect_size_is_cohens_dz_with_hedges_factor():
    differences = np.array([0.1, 0.3, 0.2, 0.6, 0.3])
    # Gamma(2) / (sqrt(2) Gamma(1.5)) for 4 degrees of freedom.
    factor = 1 / (math.sqrt(2) * math.sqrt(math.pi) / 2)
    expected = factor * differences.mean() / differences.std(ddof=1)
    assert estimate(differences).effect_size == pytest.approx(expected, rel=1e-12)
    assert math.isnan(estimate(differences[:2]).effect_size)


@pytest.mark.parametrize(("up", "down"), [(3, 0), (5, 1), (9, 1), (4, 4)])
def test_sign_test_is_scipys_binomial(up, down):
    differences = np.concatenate([np.arange(1, up + 1), -np.arange(1, down + 1), [0.0]])
    expected = scipy_stats.binomtest(up, up + down).pvalue
    assert estimate(differences).sign_p == pytest.approx(expected, rel=1e-12)


def test_missing_runs_are_dropped_in_pairs_and_counted():
    treated, control = two_arms(6)
    treated[1], control[4] = math.nan, math.nan
    result = paired_difference(treated, control)
    kept = [0, 2, 3, 5]
    assert (result.n, result.dropped) == (4, 2)
    expected = scipy_stats.ttest_rel(treated[kept], control[kept]).pvalue
    assert result.p == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("treated", "control", "message"),
    [
        ([0.1], [0.2], "at least 2 complete seeds, got 1"),
        ([0.1, math.nan], [0.2, 0.3], r"got 1 \(1 dropped"),
        ([0.1, math.inf], [0.2, 0.3], "infinite"),
        ([0.1, 0.2], [0.2, 0.3, 0.4], "one length"),
    ],
)
def test_what_cannot_be_estimated_is_refused(treated, control, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(treated, control)


def test_seeds_that_do_not_differ_get_the_sign_test_instead_of_a_t_test():
    few = paired_difference([0.3, 0.4, 0.5], [0.2, 0.3, 0.4])
    assert (few.method, few.p, few.low, few.high) == ("sign", 0.25, -math.inf, math.inf)
    many = paired_difference(np.linspace(0.1, 0.8, 6) + 0.1, np.linspace(0.1, 0.8, 6))
    assert (many.p, many.low, many.high) == pytest.approx((2 / 64, 0.1, 0.1))
    tied = paired_difference([0.3, 0.4, 0.5], [0.3, 0.4, 0.5])
    assert (tied.value, tied.p) == (0.0, 1.0)
    # 0.1 + 0.2 is not 0.3 in binary: rounding is no variation.
    four = [[0.1, 0.7], [-0.2, 0.4], [0.3, 0.3], [0.0, 0.0]]
    rounding = contrast(four, [1.0, -1.0, -1.0, 1.0])
    assert (rounding.value, rounding.sd, rounding.p) == (0.0, 0.0, 1.0)
    assert equivalence_p(few, 0.2) > 0.05
    assert equivalence_p(many, 0.2) == 1 / 64


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-10, 10), min_size=3, max_size=12),
    st.floats(-5, 5),
    st.floats(0.1, 10),
)
def test_swapping_shifting_and_scaling(values, shift, scale):
    treated = np.array(values)
    control = np.cos(np.arange(len(values)) * 7.0)
    plain, swapped = paired_difference(treated, control), paired_difference(control, treated)
    assert (swapped.low, swapped.high) == pytest.approx((-plain.high, -plain.low))
    assert swapped.p == pytest.approx(plain.p)
    moved = paired_difference(treated * scale + shift, control * scale + shift)
    expected = (plain.low * scale, plain.high * scale)
    assert (moved.low, moved.high) == pytest.approx(expected, abs=1e-9, rel=1e-6)


def square(n: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    per_seed = rng.normal(0, 1, n)
    return {
        cell: per_seed + shift + rng.normal(0, 0.5, n)
        for cell, shift in (("cosine", 1.0), ("qnorm", 0.4), ("dnorm", 0.7), ("dot", 0.0))
    }


@pytest.mark.parametrize("n", SEEDS)
def test_two_by_two_is_least_squares_and_repeated_measures_anova(n):
    cells = square(n, seed=n)
    table = pd.DataFrame(
        [
            {"value": value, "left": left, "right": right, "seed": seed}
            for cell, left, right in (
                *(("cosine", 0.5, 0.5), ("qnorm", 0.5, -0.5)),
                *(("dnorm", -0.5, 0.5), ("dot", -0.5, -0.5)),
            )
            for seed, value in enumerate(cells[cell])
        ]
    )
    result = two_by_two(**cells)
    fitted = ols("value ~ left * right + C(seed)", table).fit().params
    assert result.left.value == pytest.approx(fitted["left"])
    assert result.right.value == pytest.approx(fitted["right"])
    assert result.interaction.value == pytest.approx(fitted["left:right"])
    anova = AnovaRM(table, "value", "seed", within=["left", "right"]).fit().anova_table["Pr > F"]
    expected = (anova["left"], anova["right"], anova["left:right"])
    assert (result.left.p, result.right.p, result.interaction.p) == pytest.approx(expected)


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("margin", [0.005, 0.02, 0.2])
def test_tost_is_statsmodels(n, margin):
    treated, control = two_arms(n, seed=3)
    difference = paired_difference(treated, control)
    p, _, _ = ttost_paired(treated, control, -margin, margin)
    assert equivalence_p(difference, margin) == pytest.approx(p, rel=1e-9)
    low, high = difference.interval(0.9)
    assert (p <= 0.05) == (-margin < low and high < margin)


def test_holm_is_statsmodels():
    p = np.random.default_rng(0).uniform(0, 0.2, 12) ** 2
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])


def test_holm_refuses_what_is_no_p_value():
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.1, math.nan])


def test_correlation_is_scipys():
    rng = np.random.default_rng(0)
    x = rng.normal(size=20)
    y = x + rng.normal(size=20)
    y[3] = math.nan
    result, kept = correlation(x, y), np.arange(20) != 3
    expected = scipy_stats.pearsonr(x[kept], y[kept])
    bounds = expected.confidence_interval(0.95)
    assert result.value == pytest.approx(expected.statistic)
    assert (result.low, result.high) == pytest.approx((bounds.low, bounds.high))
    assert result.n == 19


def test_correlation_refuses_what_has_none():
    with pytest.raises(ValueError, match="constant"):
        correlation(np.ones(5), np.arange(5.0))
    with pytest.raises(ValueError, match="4 complete pairs, got 3"):
        correlation(np.arange(3.0), np.arange(3.0))


@pytest.mark.parametrize(
    ("encoder", "left_out", "r", "text"),
    [
        ("contriever", (), 0.58, 0.57),
        ("retromae", (), 0.05, 0.08),
        ("retromae", ("Pony",), 0.70, 0.68),
    ],
)
def test_correlation_on_the_published_table_19(encoder, left_out, r, text):
    table = published("unit_hypersphere_table19")
    rows = table[(table["encoder"] == encoder) & (table["level"] == "dataset")]
    rows = rows[~rows["dataset"].isin(left_out)]
    wide = rows.pivot_table(index="dataset", columns="metric", values="value")
    result = correlation(wide["cohens_d"].to_numpy(), wide["delta_percent"].to_numpy())
    assert result.n == 41 - len(left_out)
    assert result.value == pytest.approx(r, abs=0.005)
    assert result.low < text < result.high
    assert (result.low > 0) == (abs(r) > 0.5)


@pytest.mark.parametrize("n", SEEDS)
def test_power_is_statsmodels(n):
    power = t_test_power(n, 0.02, 0.03)
    assert power == pytest.approx(TTestPower().power(1.5, n, 0.05), rel=1e-6)
    smallest = smallest_difference(n, 0.02)
    expected = TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8) * 0.02
    assert smallest == pytest.approx(expected, rel=1e-4)


def test_fewest_seeds():
    needed = seeds_for_difference(0.02, 0.02)
    assert needed == math.ceil(TTestPower().solve_power(1.0, alpha=0.05, power=0.8)) == 10
    assert seeds_for_difference(1.0, 1e-4) is None
    assert seeds_for_difference(1e-3, 1.0) == 2
    with pytest.raises(ValueError, match="spread above 0"):
        seeds_for_difference(0.0, 1.0)


@pytest.mark.parametrize(("n", "difference"), [(3, 0.0), (5, 0.5), (10, 0.0)])
def test_equivalence_power_by_simulation(n, difference):
    values = np.random.default_rng(n).normal(difference, 1.0, (200_000, n))
    error = values.std(axis=1, ddof=1) / math.sqrt(n)
    reach = scipy_stats.t.ppf(0.95, n - 1) * error
    accepted = (np.abs(values.mean(axis=1)) + reach < 1.5).mean()
    power = inside_power(difference, 1 / math.sqrt(n), n - 1, 1.5)
    assert power == pytest.approx(accepted, abs=0.005)


@pytest.mark.parametrize("n", SEEDS)
def test_interval_coverage_and_false_positives(n):
    simulations = 10_000
    values = np.random.default_rng(n).normal(0.0, 1.0, (simulations, n))
    results = [estimate(row) for row in values]
    covered = np.mean([result.low <= 0 <= result.high for result in results])
    assert 0.93 <= covered <= 0.97
    assert np.mean([result.p <= 0.05 for result in results]) <= 0.056
    # A true difference at the margin: two standard errors of the simulation above 5 %.
    at_margin = [estimate(row) for row in values[:4000] + 1.0]
    accepted = np.mean([equivalence_p(result, 1.0) <= 0.05 for result in at_margin])
    assert accepted <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 4000)


def simulated(seeds, examples, sd_seeds, count, seed):
    """How often the crossed interval holds the truth, with seeds and examples drawn anew."""
    rng, hits = np.random.default_rng(seed), 0
    for _ in range(count):
        effect = 0.1 + rng.normal(0, sd_seeds, (seeds, 1)) + rng.normal(0, 0.3, (1, examples))
        found = crossed([effect + rng.normal(0, 0.4, (seeds, examples))])
        hits += found.low <= 0.1 <= found.high
    return hits / count


@pytest.mark.parametrize("sd_seeds", [0.02, 0.1])
def test_the_crossed_interval_covers_new_seeds_and_examples(sd_seeds):
    # Two thousand draws: a true coverage of 95 % stays within 93.5 and 96.5.
    assert 0.93 <= simulated(10, 100, sd_seeds, 2000, 1) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [5, 10, 20])
@pytest.mark.parametrize("examples", [60, 300, 1000])
@pytest.mark.parametrize("sd_seeds", [0.02, 0.05, 0.1, 0.3])
def test_the_crossed_interval_covers_in_many_designs(seeds, examples, sd_seeds):
    assert 0.93 <= simulated(seeds, examples, sd_seeds, 5000, 2) <= 0.97


def test_the_crossed_interval_over_two_test_sets_covers_too():
    rng, hits, count = np.random.default_rng(3), 0, 2000
    for _ in range(count):
        seed = rng.normal(0, 0.05, (10, 1))
        parts = [
            seed + rng.normal(0, 0.5, (1, size)) + rng.normal(0, 0.4, (10, size))
            for size in (60, 90)
        ]
        found = crossed(parts)
        hits += found.low <= 0 <= found.high
    assert 0.93 <= hits / count <= 0.97


def test_crossed_tells_seed_from_example_variation():
    rng = np.random.default_rng(0)
    per_seed, per_example = rng.normal(0, 1, (4, 1)), rng.normal(0, 2, (1, 50))
    found = crossed([per_seed + per_example])
    over_seeds, over_examples = per_seed.var(ddof=1) / 4, per_example.var(ddof=1) / 50
    assert found.value == pytest.approx((per_seed + per_example).mean())
    assert found.standard_error == pytest.approx(math.sqrt(over_seeds + over_examples))
    assert found.example_error == pytest.approx(math.sqrt(over_examples))
    dof = (over_seeds + over_examples) ** 2 / (over_seeds**2 / 3 + over_examples**2 / 49)
    assert found.freedom == pytest.approx(dof)
    reach = scipy_stats.t.ppf(0.975, dof) * math.sqrt(over_seeds + over_examples)
    assert (found.low, found.high) == pytest.approx((found.value - reach, found.value + reach))
    assert found.p == pytest.approx(
        2 * scipy_stats.t.sf(abs(found.value) / found.standard_error, dof)
    )


def test_crossed_without_example_variation_is_the_t_interval():
    values = np.array([0.3, 0.1, 0.4, 0.2])
    found, plain = crossed([np.repeat(values[:, None], 30, axis=1)]), estimate(values)
    assert (found.low, found.high, found.p) == pytest.approx((plain.low, plain.high, plain.p))
    same = crossed([np.full((6, 30), 0.25)])
    assert (same.method, same.low, same.high) == ("sign", 0.25, 0.25)


def test_the_residual_is_counted_once():
    """Balanced analysis of variance: (MS seeds + MS examples - MS rest) / (seeds examples)."""
    x = np.random.default_rng(5).normal(size=(6, 40)) + np.arange(6)[:, None] + np.arange(40)
    table = pd.DataFrame(
        [(s, e, x[s, e]) for s in range(6) for e in range(40)], columns=list("sey")
    )
    fitted = ols("y ~ C(s) + C(e)", table).fit()
    mean_s = 40 * x.mean(axis=1).var(ddof=1)
    mean_e = 6 * x.mean(axis=0).var(ddof=1)
    expected = (mean_s + mean_e - fitted.mse_resid) / x.size
    assert crossed([x]).standard_error == pytest.approx(math.sqrt(expected))


def test_crossed_with_missing_runs():
    rows = np.random.default_rng(0).normal(size=(4, 30))
    whole = crossed([rows[1:]])
    rows[0] = math.nan
    found = crossed([rows])
    assert (found.n, found.dropped, found.examples) == (3, 1, 30)
    assert (found.low, found.high) == (whole.low, whole.high)
    rows[2, 3] = math.nan
    with pytest.raises(ValueError, match="1 single outcomes are NaN"):
        crossed([rows])
    with pytest.raises(ValueError, match="at least 2 seeds"):
        crossed([np.ones((1, 5))])
    with pytest.raises(ValueError, match="of the same seeds"):
        crossed([np.ones((2, 5)), np.ones((3, 5))])
