"""The words of verdicts: each is reached by the interval that it names, and errs as it should."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.power import TTestPower

from offsphere.analysis.power import inside_power, t_test_power
from offsphere.analysis.stats import OverSeeds, estimate
from offsphere.analysis.verdicts import Word, claim_p, seeds_to_settle, verdict

SEEDS = (3, 5, 10)
ERROR = 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 300)


def of_interval(low: float, high: float, n: int = 10) -> OverSeeds:
    """The estimate of n seeds whose 95 % interval this is."""
    z = np.random.default_rng(0).standard_normal(n)
    sd = (high - low) / 2 * math.sqrt(n) / scipy_stats.t.ppf(0.975, n - 1)
    found = estimate((low + high) / 2 + sd * (z - z.mean()) / z.std(ddof=1))
    assert (found.low, found.high) == pytest.approx((low, high))
    return found


# The margin is 1, the published size 2 (or -2 where less is expected).
RULE = [
    ("greater", 1.1, 1.9, "shown beyond the margin", True),
    ("greater", 0.1, 0.9, "shown, inside the margin", True),
    ("greater", 0.1, 1.1, "shown", True),
    ("greater", -1.5, -0.1, "the opposite shown", False),
    ("greater", -0.9, 0.9, "equivalent", False),
    ("greater", -1.5, 1.9, "excluded", False),
    ("greater", -1.5, 2.1, "not settled", None),
    ("less", -1.9, -1.1, "shown beyond the margin", True),
    ("less", -0.9, -0.1, "shown, inside the margin", True),
    ("less", -1.1, -0.1, "shown", True),
    ("less", 0.1, 1.5, "the opposite shown", False),
    ("less", -0.9, 0.9, "equivalent", False),
    ("less", -1.9, 1.5, "excluded", False),
    ("less", -2.1, 1.5, "not settled", None),
    ("equivalent", -0.9, 0.9, "equivalent", True),
    ("equivalent", 0.1, 0.9, "shown, inside the margin", True),
    ("equivalent", -0.9, -0.1, "shown, inside the margin", True),
    ("equivalent", 1.1, 1.9, "shown beyond the margin", False),
    ("equivalent", -1.9, -1.1, "shown beyond the margin", False),
    ("equivalent", 0.1, 2.1, "shown", None),
    ("equivalent", -1.5, 2.1, "not settled", None),
    ("not_greater", -2.0, 0.9, "non-superior", True),
    ("not_greater", 0.1, 0.9, "non-superior", True),
    ("not_greater", 1.1, 1.9, "shown beyond the margin", False),
    ("not_greater", 0.5, 1.9, "not settled", None),
]


@pytest.mark.parametrize(("expect", "low", "high", "word", "holds"), RULE)
def test_words_follow_interval_and_margin(expect, low, high, word, holds):
    published = -2.0 if expect == "less" else 2.0
    decision = verdict(of_interval(low, high), expect, 1.0, published=published)
    assert (decision.word, decision.holds) == (word, holds)
    assert (decision.seeds_needed is not None) <= (word == "not settled")


def test_every_word_is_reached():
    assert {row[3] for row in RULE} == set(get_args(Word))


def test_without_a_published_size_nothing_is_excluded():
    assert verdict(of_interval(-1.5, 1.9), "greater", 1.0).word == "not settled"


@pytest.mark.parametrize(
    ("low", "high", "expect", "said"),
    [
        (1.1, 1.9, "greater", "+1.5 (95% interval +1.1 to +1.9, 10 seeds) lies beyond the margin"),
        (0.1, 0.9, "greater", "is above 0 and inside the margin of 1."),
        (0.1, 1.1, "greater", "is above 0; the margin of 1 is not excluded."),
        (-1.5, -0.1, "greater", "is below 0, the other side than expected."),
        (-1.5, 1.9, "greater", "does not reach the published +2."),
        (-2.0, 0.9, "not_greater", "lies below the margin of 1."),
        (-1.5, 2.1, "greater", "seeds settle it with 80 % power."),
    ],
)
def test_sentences(low, high, expect, said):
    assert said in verdict(of_interval(low, high), expect, 1.0, published=2.0).sentence


def test_a_family_asks_for_more():
    shown = of_interval(0.05, 1.1)
    assert verdict(shown, "greater", 1.0).word == "shown"
    assert verdict(shown, "greater", 1.0, p_adjusted=0.2, family=12).word == "not settled"
    beyond = of_interval(1.05, 3.0)
    assert verdict(beyond, "greater", 1.0).word == "shown beyond the margin"
    assert verdict(beyond, "greater", 1.0, p_adjusted=0.01, family=12).word == "shown"


def test_the_question_of_each_expectation():
    found = of_interval(-0.2, 0.9)
    z = (np.array([1.0, -1.0]) - found.value) / found.standard_error
    above, below = scipy_stats.t.cdf(z, 9)
    assert claim_p(found, "greater", 1.0) == pytest.approx(found.p)
    assert claim_p(found, "not_greater", 1.0) == pytest.approx(1 - above)
    assert claim_p(found, "equivalent", 1.0) == pytest.approx(max(1 - above, below))
    with pytest.raises(ValueError, match="needs a margin"):
        verdict(found, "equivalent")


@pytest.mark.parametrize("family", [1, 12])
def test_seeds_to_settle_have_80_percent_power(family):
    measured, alpha = of_interval(-0.2, 1.0), 0.05 / family
    needed = seeds_to_settle(measured, "greater", None, alpha=alpha)
    size = measured.value / measured.sd
    solved = TTestPower().solve_power(size, alpha=alpha, power=0.8)
    assert needed == math.ceil(solved)
    assert t_test_power(needed, measured.sd, measured.value, alpha=alpha) >= 0.8
    # Near 0 equivalence comes sooner than a difference.
    near = of_interval(-1.1, 1.2)
    needed = seeds_to_settle(near, "greater", 1.0, alpha=alpha)
    assert needed is not None
    chances = [
        inside_power(near.value, near.sd / math.sqrt(n), n - 1, 1.0, alpha=alpha)
        for n in (needed - 1, needed)
    ]
    assert chances[0] < 0.8 <= chances[1]
    # Non-superiority is a one-sided question.
    one_sided = seeds_to_settle(of_interval(-0.2, 1.2), "not_greater", 1.0, alpha=alpha)
    size = (1.0 - 0.5) / of_interval(-0.2, 1.2).sd
    solved = TTestPower().solve_power(size, alpha=alpha, power=0.8, alternative="larger")
    assert one_sided == math.ceil(solved)


@pytest.mark.parametrize(
    ("value", "expect", "margin", "family", "needed"),
    [
        (1.0, "greater", None, 1, 6),  # 2 / 2^6 <= 0.05
        (1.0, "greater", None, 12, 9),  # 2 / 2^9 <= 0.05 / 12
        (0.0, "greater", None, 1, None),
        (0.0, "greater", 0.5, 1, 5),  # 1 / 2^5 <= 0.05
        (0.1, "equivalent", 0.5, 1, 5),
        (0.1, "not_greater", 0.5, 1, 5),
    ],
)
def test_seeds_that_do_not_differ_are_counted_by_the_sign_test(
    value, expect, margin, family, needed
):
    measured = estimate(np.full(3, value))
    decision = verdict(measured, expect, margin, family=family)
    assert (decision.word, decision.seeds_needed) == ("not settled", needed)
    if needed is not None:
        enough = verdict(estimate(np.full(needed, value)), expect, margin, family=family)
        assert enough.word != "not settled"
        assert f"{needed} seeds settle it" in decision.sentence


def test_more_seeds_do_not_mend_too_few_examples():
    found = replace(of_interval(-0.3, 0.9), error=0.3, dof=30.0, example_error=0.29, examples=50)
    assert seeds_to_settle(found, "greater", None) is None
    said = verdict(found, "greater", 0.1).sentence
    assert "1000 seeds would not: it takes more test examples." in said
    assert "10 seeds and 50 examples" in said


def words(difference: float, expect, n: int, count: int) -> dict[str, float]:
    """How often each verdict falls for a true difference and the margin 1.5, in units of sd."""
    rows = np.random.default_rng(n).normal(difference, 1.0, (count, n))
    given = [verdict(estimate(row), expect, 1.5).word for row in rows]
    return {word: given.count(word) / count for word in set(given)}


def rate(words: dict[str, float], *starts: str) -> float:
    return sum(share for word, share in words.items() if word.startswith(starts))


@pytest.mark.parametrize("n", SEEDS)
def test_a_planted_null_gets_its_verdict(n):
    assert rate(words(0.0, "greater", n, 300), "shown", "the opposite") <= ERROR
    equivalent = words(0.0, "equivalent", n, 300)
    assert rate(equivalent, "shown beyond") <= ERROR
    expected = inside_power(0.0, 1 / math.sqrt(n), n - 1, 1.5)
    inside = rate(equivalent, "equivalent", "shown, inside")
    assert inside == pytest.approx(expected, abs=0.09)


@pytest.mark.parametrize("n", SEEDS)
def test_a_planted_effect_gets_its_verdict(n):
    found = words(3.0, "greater", n, 300)
    assert rate(found, "shown") == pytest.approx(t_test_power(n, 1.0, 3.0), abs=0.09)
    assert rate(found, "equivalent", "shown, inside") <= ERROR
    assert rate(words(3.0, "less", n, 300), "shown") == 0
    assert rate(words(3.0, "equivalent", n, 300), "equivalent", "shown, inside") <= ERROR
    assert rate(words(3.0, "not_greater", n, 300), "non-superior") <= ERROR
    # A true difference at the margin is called beyond it no more often than chance allows.
    assert rate(words(1.5, "greater", n, 300), "shown beyond") <= ERROR
