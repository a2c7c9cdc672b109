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

from offsphere.analysis.published import published
from offsphere.analysis.stats import (
    claim_p_values,
    correlation,
    crossed_bootstrap,
    equivalence,
    equivalence_power,
    estimate,
    holm,
    interaction,
    paired_difference,
    power_note,
    seeds_for_difference,
    seeds_for_equivalence,
    smallest_difference,
    t_test_power,
    two_by_two,
    verdict,
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
    result = paired_difference(treated, control, level=level)
    expected = scipy_stats.ttest_rel(treated, control)
    bounds = expected.confidence_interval(level)
    assert result.mean == pytest.approx((treated - control).mean(), rel=1e-12)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-10)
    assert (result.low, result.high) == pytest.approx((bounds.low, bounds.high), rel=1e-10)
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
    assert (tied.mean, tied.p) == (0.0, 1.0)
    # 0.1 + 0.2 is not 0.3 in binary: rounding is no variation.
    rounding = interaction([0.1, 0.7], [-0.2, 0.4], [0.3, 0.3], [0.0, 0.0])
    assert (rounding.mean, rounding.sd, rounding.p) == (0.0, 0.0, 1.0)
    assert not equivalence(few, 0.2).equivalent
    assert equivalence(many, 0.2).p == 1 / 64


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
    assert result.left.mean == pytest.approx(fitted["left"])
    assert result.right.mean == pytest.approx(fitted["right"])
    assert result.interaction.mean == pytest.approx(fitted["left:right"])
    anova = AnovaRM(table, "value", "seed", within=["left", "right"]).fit().anova_table["Pr > F"]
    expected = (anova["left"], anova["right"], anova["left:right"])
    assert (result.left.p, result.right.p, result.interaction.p) == pytest.approx(expected)


def test_interaction_is_the_difference_of_differences():
    cells = square(5, seed=1)
    result = interaction(cells["cosine"], cells["dnorm"], cells["qnorm"], cells["dot"])
    by_hand = (cells["cosine"] - cells["dnorm"]) - (cells["qnorm"] - cells["dot"])
    assert result.p == pytest.approx(scipy_stats.ttest_1samp(by_hand, 0).pvalue)
    assert result == two_by_two(**cells).interaction


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("margin", [0.005, 0.02, 0.2])
def test_tost_is_statsmodels(n, margin):
    treated, control = two_arms(n, seed=3)
    result = equivalence(paired_difference(treated, control), margin)
    p, _, _ = ttost_paired(treated, control, -margin, margin)
    assert result.p == pytest.approx(p, rel=1e-9)
    assert result.equivalent == (p <= 0.05) == (-margin < result.low and result.high < margin)


def test_holm_is_statsmodels():
    p = np.random.default_rng(0).uniform(0, 0.2, 12) ** 2
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])


def test_holm_with_fewer_true_hypotheses():
    p = [0.001, 0.02, 0.03, 0.9]
    # Two can be true at once: factors 2, 2, 2, 1.
    assert holm(p, most_true=2) == pytest.approx([0.002, 0.04, 0.06, 0.9])
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
    assert (result.r, result.p) == pytest.approx((expected.statistic, expected.pvalue))
    assert (result.low, result.high) == pytest.approx((bounds.low, bounds.high))
    assert (result.n, result.dropped) == (19, 1)


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
    assert result.r == pytest.approx(r, abs=0.005)
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
    enough = seeds_for_equivalence(0.02, 0.02)
    assert enough is not None
    assert equivalence_power(enough, 0.02, 0.02) >= 0.8 > equivalence_power(enough - 1, 0.02, 0.02)


@pytest.mark.parametrize(("n", "difference"), [(3, 0.0), (5, 0.5), (10, 0.0)])
def test_equivalence_power_by_simulation(n, difference):
    values = np.random.default_rng(n).normal(difference, 1.0, (200_000, n))
    error = values.std(axis=1, ddof=1) / math.sqrt(n)
    reach = scipy_stats.t.ppf(0.95, n - 1) * error
    accepted = (np.abs(values.mean(axis=1)) + reach < 1.5).mean()
    power = equivalence_power(n, 1.0, 1.5, difference=difference)
    assert power == pytest.approx(accepted, abs=0.005)


def test_power_note_says_what_seeds_can_show():
    note = power_note(5, 0.01, margin=0.01)
    assert note.smallest_difference == pytest.approx(0.01682, abs=1e-5)
    assert note.seeds_for_equivalence == seeds_for_equivalence(0.01, 0.01)
    assert note.text == (
        "With 5 seeds only differences above 0.0168 are seen with 80% power. To show equivalence "
        f"within 0.01, TOST needs {note.seeds_for_equivalence} seeds."
    )
    with pytest.raises(ValueError, match="spread above 0"):
        power_note(5, 0.0)


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
    accepted = np.mean([equivalence(result, 1.0).equivalent for result in at_margin])
    assert accepted <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 4000)


def words(difference: float, expect, n: int, count: int) -> dict[str, float]:
    """How often each verdict falls for a true difference and the margin 1.5, in units of sd."""
    rows = np.random.default_rng(n).normal(difference, 1.0, (count, n))
    given = [verdict(estimate(row), expect, 1.5, alpha=0.05).word for row in rows]
    return {word: given.count(word) / count for word in set(given)}


ERROR = 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.parametrize("n", SEEDS)
def test_a_planted_null_gets_its_verdict(n):
    rates = words(0.0, "greater", n, 300)
    assert rates.get("supported", 0) + rates.get("contradicted", 0) <= ERROR
    equivalent = words(0.0, "equivalent", n, 300)
    assert equivalent.get("contradicted", 0) <= ERROR
    expected = equivalence_power(n, 1.0, 1.5)
    assert equivalent.get("equivalent", 0) == pytest.approx(expected, abs=0.09)


@pytest.mark.parametrize("n", SEEDS)
def test_a_planted_effect_gets_its_verdict(n):
    rates = words(3.0, "greater", n, 300)
    assert rates.get("supported", 0) == pytest.approx(t_test_power(n, 1.0, 3.0), abs=0.09)
    assert rates.get("equivalent", 0) <= ERROR
    assert words(3.0, "less", n, 300).get("supported", 0) == 0
    assert words(3.0, "equivalent", n, 300).get("equivalent", 0) <= ERROR
    assert words(3.0, "not_greater", n, 300).get("supported", 0) <= ERROR


@pytest.mark.parametrize(
    ("values", "expect", "margin", "word", "part"),
    [
        ([2.0, 2.1, 1.9], "greater", 1.0, "supported", "is above 0."),
        ([2.0, 2.1, 1.9], "less", 1.0, "contradicted", "is above 0."),
        ([0.2, 0.21, 0.19], "greater", 1.0, "supported", "but inside the margin of 1"),
        ([0.1, -0.1, 0.05], "greater", 1.0, "equivalent", "inside the margin of 1"),
        ([1.0, -1.0, 0.5], "greater", 0.5, "inconclusive", "29 seeds would settle it"),
        ([1.0, -1.0, 0.5], "greater", None, "inconclusive", "a difference of either sign."),
        ([0.1, -0.1, 0.05], "equivalent", 1.0, "equivalent", "inside the margin of 1"),
        ([2.0, 2.1, 1.9], "equivalent", 1.0, "contradicted", "outside the margin of 1"),
        ([-2.0, -2.1, -1.9], "equivalent", 1.0, "contradicted", "outside the margin of 1"),
        ([-2.0, -2.1, -1.9], "not_greater", 1.0, "supported", "below the margin of 1"),
        ([2.0, 2.1, 1.9], "not_greater", 1.0, "contradicted", "above the margin of 1"),
        ([1.0, -1.0, 0.0], "not_greater", 1e-6, "inconclusive", "more than 1000 seeds"),
    ],
)
def test_verdicts_in_words(values, expect, margin, word, part):
    decision = verdict(estimate(np.array(values)), expect, margin)
    assert decision.word == word
    assert part in decision.sentence
    if word != "inconclusive":
        assert decision.seeds_needed is None


@pytest.mark.parametrize("family", [1, 10])
def test_the_seeds_that_would_settle_a_claim_do(family):
    """Repeated as often as it says, with mean and spread unchanged, the values decide."""
    values = np.array([1.0, -1.0, 0.5, 0.6])
    for expect in ("greater", "equivalent", "not_greater"):
        needed = verdict(estimate(values), expect, 0.9, family=family).seeds_needed
        assert needed is not None
        assert needed > 4
        for n, decided in ((needed - 1, False), (needed, True)):
            z = np.random.default_rng(0).standard_normal(n)
            same = values.mean() + values.std(ddof=1) * (z - z.mean()) / z.std(ddof=1)
            decision = verdict(estimate(same), expect, 0.9, alpha=0.05 / family)
            assert (decision.word != "inconclusive") == decided, (expect, n)


def test_verdict_follows_the_adjusted_p_values():
    measured = estimate(np.array([2.0, 2.1, 1.9]))
    assert claim_p_values(measured, "greater", 1.0)[0] < 0.01
    assert verdict(measured, "greater", 1.0, p_values=(0.06, 1.0)).word == "inconclusive"
    with pytest.raises(ValueError, match="needs a margin"):
        verdict(measured, "equivalent")


@pytest.mark.parametrize("sd_seeds", [0.02, 0.3])
@pytest.mark.parametrize("seeds", SEEDS)
def test_crossed_bootstrap_covers_new_seeds_and_examples(seeds, sd_seeds):
    rng, hits, count, examples = np.random.default_rng(seeds), 0, 150, 60
    for trial in range(count):
        control = rng.normal(0, 1, (seeds, examples))
        effect = 0.1 + rng.normal(0, sd_seeds, (seeds, 1)) + rng.normal(0, 0.3, (1, examples))
        noise = rng.normal(0, 0.4, (seeds, examples))
        found = crossed_bootstrap(control + effect + noise, control, resamples=200, seed=trial)
        hits += found.low <= 0.1 <= found.high
    assert hits / count >= 0.95 - 2.5 * math.sqrt(0.95 * 0.05 / count)


def test_crossed_bootstrap_tells_seed_from_example_variation():
    rng = np.random.default_rng(0)
    per_seed, per_example = rng.normal(0, 1, (4, 1)), rng.normal(0, 2, (1, 50))
    found = crossed_bootstrap(per_seed + per_example, np.zeros((4, 50)), resamples=300)
    assert found.mean == pytest.approx((per_seed + per_example).mean())
    assert found.se_seeds == pytest.approx(per_seed.std(ddof=1) / 2)
    assert found.se_examples == pytest.approx(per_example.std(ddof=1) / math.sqrt(50))
    assert found == crossed_bootstrap(per_seed + per_example, np.zeros((4, 50)), resamples=300)


def test_crossed_bootstrap_with_missing_runs():
    rng = np.random.default_rng(0)
    treated, control = rng.normal(size=(4, 30)), rng.normal(size=(4, 30))
    whole = crossed_bootstrap(treated[1:], control[1:], resamples=50)
    treated[0] = math.nan
    found = crossed_bootstrap(treated, control, resamples=50)
    assert (found.seeds, found.dropped) == (3, 1)
    assert (found.low, found.high) == (whole.low, whole.high)
    treated[2, 3] = math.nan
    with pytest.raises(ValueError, match="1 single outcomes are NaN"):
        crossed_bootstrap(treated, control)
    with pytest.raises(ValueError, match="at least 2 seeds"):
        crossed_bootstrap(np.ones((1, 5)), np.zeros((1, 5)))
    with pytest.raises(ValueError, match="of one shape"):
        crossed_bootstrap(np.ones((2, 5)), np.zeros((2, 4)))
