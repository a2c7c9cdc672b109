"""A value, its interval and its number of examples: units, sides and words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from offsphere.estimate import Estimate


def test_an_interval_lies_on_one_side_or_includes_the_number():
    found = Estimate(0.2, 0.1, 0.3, 40)
    assert [found.excludes(x) for x in (0.0, 0.1, 0.2, 0.3, 0.4)] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert not Estimate(0.2).excludes(0.0)  # no interval excludes nothing


def test_shares_become_points():
    found = Estimate(0.25, -0.5, 1.0, 8).times(100)
    assert dataclasses.astuple(found) == (25.0, -50.0, 100.0, 8)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Estimate(1.25, -0.5, 3.0, 5), "+1.2 [-0.5, +3.0]"),
        (Estimate(1.25), "+1.2"),
        (Estimate(1.25, -math.inf, math.inf, 2), "+1.2"),
    ],
)
def test_the_interval_is_said_with_the_value(found, words):
    assert f"{found:+.1f}" == words
