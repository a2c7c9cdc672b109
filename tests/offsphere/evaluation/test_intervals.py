"""Intervals of shares and differences, against statsmodels, closed forms and coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest
from statsmodels.stats.proportion import proportion_confint

from offsphere.estimate import Estimate
from offsphere.evaluation import intervals
from offsphere.evaluation.intervals import (
    change,
    clustered_mean,
    draws,
    percentiles,
    share,
    square_and_add,
    wilson,
    zero_mean_p,
)


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 20), (1, 20), (7, 20), (20, 20), (3, 1000)])
def test_wilson_is_statsmodels(right, n, level):
    expected = proportion_confint(right, n, 1 - level, method="wilson")
    assert wilson(right / n, n, level) == pytest.approx(expected, abs=1e-12)


def test_of_no_changed_pair_the_interval_is_wilsons_of_nothing():
    """z^2 / (n + z^2) on either side."""
    for n in (4, 100, 1000):
        reach = 1.959963984540054**2 / (n + 1.959963984540054**2)
        assert square_and_add(0, 0, n, 0.95) == pytest.approx((-reach, reach), abs=1e-12)


def test_few_changed_pairs_are_newcombes_square_and_add():
    gain, loss = (proportion_confint(k, 50, 0.05, method="wilson") for k in (3, 1))
    low = 0.04 - math.hypot(0.06 - gain[0], loss[1] - 0.02)
    high = 0.04 + math.hypot(gain[1] - 0.06, 0.02 - loss[0])
    assert square_and_add(3, 1, 50, 0.95) == pytest.approx((low, high), abs=1e-12)


def test_the_bootstrap_decides_where_there_is_enough_of_either_kind():
    drawn = torch.linspace(0, 1, 1001, dtype=torch.float64)
    middle = pytest.approx((0.025, 0.975))
    found = share(0.5, drawn, 20, 0.95)
    assert ((found.low, found.high), found.value, found.n) == (middle, 0.5, 20)
    assert share(0.2, drawn, 20, 0.95) == Estimate(0.2, *wilson(0.2, 20, 0.95), 20)
    all_right = share(1.0, torch.ones(9), 20, 0.95)
    assert (all_right.low, all_right.high) == pytest.approx((0.83887, 1.0), abs=1e-5)
    changes = torch.zeros(100, dtype=torch.float64)
    changes[:3], changes[3] = 1, -1
    want = Estimate(0.02, *square_and_add(3, 1, 100, 0.95), 100)
    assert change(0.02, changes, drawn, 0.95) == want
    changes[4:6] = 1
    found = change(0.04, changes, drawn, 0.95)
    assert ((found.low, found.high), found.value) == (middle, 0.04)
    nan = torch.tensor([math.nan, 1.0, 3.0], dtype=torch.float64)
    assert percentiles(nan, 0.5) == (1.5, 2.5)


def coverage(gain: float, loss: float, n: int) -> float:
    """How often the interval of rare changes holds the true difference, exactly."""
    rng = np.random.default_rng(0)
    held = 0
    for gains, losses, _ in rng.multinomial(n, [gain, loss, 1 - gain - loss], size=4000):
        low, high = square_and_add(gains, losses, n, 0.95)
        held += low <= gain - loss <= high
    return held / 4000


@pytest.mark.parametrize(("gain", "loss"), [(0.01, 0.01), (0.02, 0.0), (0.005, 0.02), (0.0, 0.0)])
def test_rare_changes_are_covered(gain, loss):
    assert coverage(gain, loss, 120) >= 0.93


def test_the_exact_test_is_what_six_bets_own():
    random = np.random.default_rng(0)
    for changes in (random.uniform(-1, 2, 12), random.choice([-2.0, 0.0, 2.0], 12)):
        owned = [math.prod(1 + bet * x / 2 for x in changes) for bet in (0.5, 0.75, 1)]
        owned += [math.prod(1 - bet * x / 2 for x in changes) for bet in (0.5, 0.75, 1)]
        want = min(1, 1 / np.mean(owned))
        assert zero_mean_p(torch.tensor(changes), 2.0) == pytest.approx(want, rel=1e-12)
    assert zero_mean_p(torch.zeros(50), 1.0) == 1.0
    assert zero_mean_p(torch.ones(20_000), 1.0) == 0.0


@pytest.mark.parametrize(("gain", "loss"), [(1.0, 1.0), (0.05, 0.45), (0.03, 0.97), (0.9, 0.1)])
@pytest.mark.parametrize("n", [10, 18, 50, 93])
def test_few_skewed_changes_raise_no_more_false_alarms_than_is_said(gain, loss, n):
    """Of n changes that are 0 in the mean, each a gain or a loss, over all that may come."""
    gains = range(n + 1)
    chance = binom.pmf(gains, n, loss / (gain + loss))
    p = [zero_mean_p(torch.tensor([gain] * k + [-loss] * (n - k)), 1.0) for k in gains]
    for level in (0.01, 0.05, 0.2):
        assert chance[np.array(p) <= level].sum() <= level


def test_a_sign_test_would_raise_them():
    """Of 18 changes nearly all are the small gain: why there is no sign test."""
    p = [binomtest(k, 18).pvalue for k in range(19)]
    assert binom.pmf(range(19), 18, 0.9)[np.array(p) <= 0.05].sum() > 0.95


@pytest.mark.parametrize("n", [10, 18, 50, 93])
def test_changes_with_ties_and_a_long_tail_raise_none(n):
    random = np.random.default_rng(1)
    kind = random.random((500, n))
    gains, losses = random.uniform(0, 0.2, (500, n)), random.uniform(0, 0.8, (500, n))
    changes = np.where(kind < 0.5, 0.0, np.where(kind < 0.9, gains, -losses))
    p = [zero_mean_p(torch.from_numpy(x), 1.0) for x in changes]
    assert (np.array(p) <= 0.05).mean() <= 0.05


@pytest.mark.parametrize(("n", "settled"), [(10, False), (30, True), (93, True)])
def test_a_clear_loss_over_few_is_told(n, settled):
    """33 points with a spread of 24, as MiniLM's dot has on NPL."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changes = -0.327 + 0.24 * (x - x.mean()) / x.std()
    assert (zero_mean_p(changes.clamp(-1, 1), 1.0) <= 0.05) == settled


def test_captions_are_drawn_with_their_image():
    image = torch.tensor([0, 0, 3, 3, 3, 7])
    values = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    found = clustered_mean(values, image, 0.8, resamples=50, seed=2)
    groups = [values[image == name].numpy() for name in (0, 3, 7)]
    (rows,) = draws(3, 50, 2)
    means = [np.concatenate([groups[i] for i in row]).mean() for row in rows.tolist()]
    assert found.value == pytest.approx(0.5)
    assert [found.low, found.high] == pytest.approx(np.quantile(means, [0.1, 0.9]), abs=1e-9)


def test_bootstrap_spreads_like_the_binomial():
    """The mean of shares has a standard error with a closed form."""
    hits = (torch.arange(400) < 100).double()
    found = clustered_mean(hits, torch.arange(400), 0.95, resamples=4000, seed=0)
    reach = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert found.value == 0.25
    assert (found.low, found.high) == pytest.approx((0.25 - reach, 0.25 + reach), abs=0.004)


def test_draws_in_parts_are_the_same_number(monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS_AT_ONCE", 25)
    assert [len(part) for part in draws(10, 5, seed=0)] == [2, 2, 1]
