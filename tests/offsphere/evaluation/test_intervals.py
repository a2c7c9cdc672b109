"""Intervals of shares and differences, against statsmodels, closed forms and coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from statsmodels.stats.proportion import proportion_confint

from offsphere.evaluation.intervals import (
    change_interval,
    percentiles,
    share_interval,
    square_and_add,
    wilson,
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
    assert share_interval(0.5, drawn, 20, 0.95) == pytest.approx((0.025, 0.975))
    assert share_interval(0.2, drawn, 20, 0.95) == wilson(0.2, 20, 0.95)
    assert share_interval(1.0, torch.ones(9), 20, 0.95) == pytest.approx((0.83887, 1.0), abs=1e-5)
    changes = torch.zeros(100, dtype=torch.float64)
    changes[:3], changes[3] = 1, -1
    assert change_interval(changes, drawn, 0.95) == square_and_add(3, 1, 100, 0.95)
    changes[4:6] = 1
    assert change_interval(changes, drawn, 0.95) == pytest.approx((0.025, 0.975))
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
