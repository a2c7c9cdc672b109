"""Statistics of a few paired seeds: intervals, equivalence, families, power. No torch.

Every contrast (a difference, a main effect, an interaction) is first one number per seed, so one
t-interval serves them all. NaN is a missing run: its seed is dropped and counted in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import special

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray as Array

Expectation = Literal["greater", "less", "equivalent", "not_greater"]
EXPECTATIONS: tuple[Expectation, ...] = ("greater", "less", "equivalent", "not_greater")
Word = Literal["supported", "contradicted", "equivalent", "inconclusive"]

ROUNDING = 1e-12
"""Spread below this share of the data's size is rounding, not variation."""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Estimate:
    """The mean of one number per seed, its interval and its two-sided test against 0.

    Where the seeds do not differ at all a t-test does not exist; then `method` is `sign`: p is
    the exact sign test's, and the interval the order statistics', which is unbounded until there
    are enough seeds for `level` (6 for 95 %).
    """

    mean: float
    low: float
    high: float
    level: float
    sd: float
    """Standard deviation over seeds (n - 1)."""
    n: int
    """Complete seeds."""
    dropped: int
    """Seeds left out because a run is missing or gave NaN."""
    p: float
    effect_size: float
    """Cohen's d_z = mean / sd with Hedges' exact small-sample factor; NaN for 2 seeds or sd 0."""
    sign_p: float
    """The exact two-sided sign test, which assumes no normality; seeds that tie are left out."""
    method: Literal["t", "sign"]

    def p_above(self, bound: float) -> float:
        """One-sided p of the hypothesis that the mean is at most `bound`."""
        if self.method == "sign":
            return 0.5**self.n if self.mean > bound else 1.0
        return float(special.stdtr(self.n - 1, -(self.mean - bound) / _standard_error(self)))

    def p_below(self, bound: float) -> float:
        """One-sided p of the hypothesis that the mean is at least `bound`."""
        if self.method == "sign":
            return 0.5**self.n if self.mean < bound else 1.0
        return float(special.stdtr(self.n - 1, (self.mean - bound) / _standard_error(self)))


@dataclass(frozen=True)
class TwoByTwo:
    """What normalising each side does, in the square of the four corner cells."""

    left: Estimate
    """Mean of the left-normalised cells minus mean of the others."""
    right: Estimate
    interaction: Estimate
    """Effect of normalising left where right is normalised, minus where it is not."""


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST): is the mean inside (-margin, margin)?"""

    margin: float
    p: float
    low: float
    high: float
    """The 1 - 2 alpha interval: inside the margins exactly when p <= alpha."""
    equivalent: bool
    alpha: float


@dataclass(frozen=True)
class CrossedInterval:
    """A difference over all seeds and examples, with an interval that covers both being redrawn."""

    mean: float
    low: float
    high: float
    level: float
    seeds: int
    examples: int
    dropped: int
    """Seeds left out because a run is missing."""
    se_seeds: float
    """Standard error if only seeds were redrawn."""
    se_examples: float
    """Standard error if only examples were redrawn."""


@dataclass(frozen=True)
class Correlation:
    """Pearson's r with Fisher's z interval."""

    r: float
    low: float
    high: float
    level: float
    n: int
    dropped: int
    p: float


@dataclass(frozen=True)
class PowerNote:
    """What a number of seeds can show at a given spread of the paired differences."""

    n: int
    sd: float
    smallest_difference: float
    """Seen with the stated power by the two-sided paired t-test."""
    margin: float | None
    seeds_for_equivalence: int | None
    """Seeds with which TOST accepts a true difference of 0; None: more than 1000 or no margin."""
    text: str


@dataclass(frozen=True)
class Decision:
    """The verdict on a claim, in one word and one sentence."""

    word: Word
    sentence: str
    seeds_needed: int | None
    """For an inconclusive claim: the seeds that settle it if mean and spread stay the same."""


def contrast(
    arms: Sequence[Float[Array, " seeds"]], weights: Sequence[float], *, level: float = 0.95
) -> Estimate:
    """The weighted sum of several arms, seed by seed; a seed that lacks one of them is dropped."""
    _check_share("level", level)
    stacked = np.stack(_equal_vectors(arms))
    whole = ~np.isnan(stacked).any(axis=0)
    n, dropped = int(whole.sum()), int((~whole).sum())
    if n < 2:
        raise ValueError(
            f"An interval needs at least 2 complete seeds, got {n} ({dropped} dropped because a "
            "run is missing)."
        )
    kept = stacked[:, whole]
    values = np.asarray(weights) @ kept
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    size = float(np.abs(kept).max())
    if abs(mean) <= ROUNDING * size:
        mean = 0.0
    signs = np.sign(np.where(np.abs(values) <= ROUNDING * size, 0.0, values))
    sign_p = _sign_test(int((signs > 0).sum()), int((signs < 0).sum()))
    if sd <= ROUNDING * size:
        reach = 0.0 if 0.5 ** (n - 1) <= 1 - level else math.inf
        return Estimate(
            mean, mean - reach, mean + reach, level, 0.0, n, dropped, sign_p, math.nan, sign_p,
            "sign",
        )  # fmt: skip
    t = mean / (sd / math.sqrt(n))
    reach = float(special.stdtrit(n - 1, (1 + level) / 2)) * sd / math.sqrt(n)
    p = 2 * float(special.stdtr(n - 1, -abs(t)))
    return Estimate(
        mean, mean - reach, mean + reach, level, sd, n, dropped, p,
        mean / sd * _hedges_factor(n - 1), sign_p, "t",
    )  # fmt: skip


def estimate(values: Float[Array, " seeds"], *, level: float = 0.95) -> Estimate:
    """The mean of one number per seed (a difference, an AUROC minus 0.5), with its t-interval."""
    return contrast([values], [1.0], level=level)


def paired_difference(
    treated: Float[Array, " seeds"], control: Float[Array, " seeds"], *, level: float = 0.95
) -> Estimate:
    """treated - control, where the same position is the same seed."""
    return contrast([treated, control], [1.0, -1.0], level=level)


def interaction(
    treated: Float[Array, " seeds"],
    control: Float[Array, " seeds"],
    treated_elsewhere: Float[Array, " seeds"],
    control_elsewhere: Float[Array, " seeds"],
    *,
    level: float = 0.95,
) -> Estimate:
    """(treated - control) here minus (treated - control) elsewhere, paired by seed."""
    four = [treated, control, treated_elsewhere, control_elsewhere]
    return contrast(four, [1.0, -1.0, -1.0, 1.0], level=level)


def two_by_two(
    cosine: Float[Array, " seeds"],
    qnorm: Float[Array, " seeds"],
    dnorm: Float[Array, " seeds"],
    dot: Float[Array, " seeds"],
    *,
    level: float = 0.95,
) -> TwoByTwo:
    """Main effects and interaction of normalising left and right; a seed needs all four cells."""
    four = [cosine, qnorm, dnorm, dot]
    return TwoByTwo(
        left=contrast(four, [0.5, 0.5, -0.5, -0.5], level=level),
        right=contrast(four, [0.5, -0.5, 0.5, -0.5], level=level),
        interaction=contrast(four, [1.0, -1.0, -1.0, 1.0], level=level),
    )


def equivalence(difference: Estimate, margin: float, *, alpha: float = 0.05) -> Equivalence:
    """TOST of a paired difference (or any contrast) against a margin fixed in advance."""
    _check_share("alpha", alpha)
    _check_margin(margin)
    p = max(difference.p_above(-margin), difference.p_below(margin))
    low, high = _interval(difference, 1 - 2 * alpha)
    return Equivalence(margin, p, low, high, p <= alpha, alpha)


def holm(
    p_values: Float[Array, " tests"] | Sequence[float], *, most_true: int | None = None
) -> Float[Array, " tests"]:
    """Holm's adjusted p-values, in the order given.

    `most_true` is how many of the null hypotheses can be true at once, if that is fewer than all
    (Shaffer 1986): of "no difference" and "a difference of at least the margin" only one can be.
    """
    p = np.asarray(p_values, float)
    if p.ndim != 1 or not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError(f"Expected p-values between 0 and 1, got {p.tolist()}.")
    order = np.argsort(p, kind="stable")
    left = np.arange(len(p), 0, -1)
    factors = left if most_true is None else np.minimum(left, most_true)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return adjusted


def crossed_bootstrap(
    treated: Float[Array, "seeds examples"],
    control: Float[Array, "seeds examples"],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> CrossedInterval:
    """treated - control per example, with seeds and examples both resampled.

    Percentile-t, and never narrower than the t-reach over seeds and the t-reach over examples
    added in squares, because the resampled t alone covers too little when 3 to 5 seeds dominate.
    It covers new training seeds and new test examples of the same kind at once, which neither the
    t-interval over seeds (the test set is taken as given) nor a bootstrap over examples (the
    trained models are taken as given) does. It does not cover other data sets.
    """
    _check_share("level", level)
    treated, control = np.asarray(treated, float), np.asarray(control, float)
    if treated.ndim != 2 or treated.shape != control.shape:
        raise ValueError(
            "Expected two matrices, seeds x examples, of one shape; got "
            f"{treated.shape} and {control.shape}."
        )
    _refuse_infinite(treated, control)
    difference = treated - control
    missing = np.isnan(difference)
    whole = ~missing.all(axis=1)
    if missing[whole].any():
        raise ValueError(
            f"{int(missing[whole].sum())} single outcomes are NaN: a seed's run is there with all "
            "its examples, or is missing as a whole (a row of NaN)."
        )
    kept = difference[whole]
    seeds, examples = kept.shape
    if seeds < 2 or examples < 2:
        raise ValueError(
            f"Expected at least 2 seeds and 2 examples, got {seeds} and {examples} "
            f"({len(difference) - seeds} seeds dropped)."
        )
    mean, se_seeds, se_examples = _crossed_errors(kept, np.ones((1, seeds)), np.ones((1, examples)))
    error = math.hypot(se_seeds[0], se_examples[0])
    reach = math.hypot(
        special.stdtrit(seeds - 1, (1 + level) / 2) * se_seeds[0],
        special.stdtrit(examples - 1, (1 + level) / 2) * se_examples[0],
    )
    t = _crossed_t(kept, resamples, np.random.default_rng(seed))
    below, above = np.quantile(t, [(1 - level) / 2, (1 + level) / 2]) if len(t) else (0.0, 0.0)
    return CrossedInterval(
        mean=float(mean[0]),
        low=float(mean[0] - max(above * error, reach)),
        high=float(mean[0] + max(-below * error, reach)),
        level=level,
        seeds=seeds,
        examples=examples,
        dropped=len(difference) - seeds,
        se_seeds=float(se_seeds[0]),
        se_examples=float(se_examples[0]),
    )


def correlation(
    x: Float[Array, " n"], y: Float[Array, " n"], *, level: float = 0.95
) -> Correlation:
    """Pearson's r across data sets, such as Cohen's d of the norms against the gain."""
    _check_share("level", level)
    x, y = _equal_vectors([x, y])
    whole = ~(np.isnan(x) | np.isnan(y))
    n = int(whole.sum())
    if n < 4:
        raise ValueError(
            f"A correlation's interval needs 4 complete pairs, got {n} ({len(x) - n} dropped)."
        )
    a, b = x[whole] - x[whole].mean(), y[whole] - y[whole].mean()
    if _is_constant(x[whole]) or _is_constant(y[whole]):
        raise ValueError("One of the two is constant: their correlation is undefined.")
    r = float(np.clip(a @ b / math.sqrt((a @ a) * (b @ b)), -1.0, 1.0))
    if abs(r) == 1.0:
        return Correlation(r, r, r, level, n, len(x) - n, 0.0)
    reach = special.ndtri((1 + level) / 2) / math.sqrt(n - 3)
    low, high = math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach)
    t = r * math.sqrt((n - 2) / (1 - r * r))
    p = 2 * float(special.stdtr(n - 2, -abs(t)))
    return Correlation(r, low, high, level, n, len(x) - n, p)


def t_test_power(n: int, sd: float, difference: float, *, alpha: float = 0.05) -> float:
    """Chance that the two-sided paired t-test of n seeds sees a true difference."""
    _check_spread(n, sd)
    shift = abs(difference) / sd * math.sqrt(n)
    critical = special.stdtrit(n - 1, 1 - alpha / 2)
    # scipy gives NaN for a chance of the wrong sign that is too small for it.
    wrong_sign = np.nan_to_num(special.nctdtr(n - 1, shift, -critical))
    return float(1 - special.nctdtr(n - 1, shift, critical) + wrong_sign)


def equivalence_power(
    n: int, sd: float, margin: float, *, difference: float = 0.0, alpha: float = 0.05
) -> float:
    """Chance that TOST of n seeds accepts a true difference as inside the margin."""
    _check_spread(n, sd)
    _check_margin(margin)
    critical = special.stdtrit(n - 1, 1 - alpha)
    # Over the seeds' spread s / sd, a chi variable: accepted where |mean| < margin - t s / sqrt n.
    shares = (np.arange(400) + 0.5) / 400
    spread = sd * np.sqrt(2 * special.gammaincinv((n - 1) / 2, shares) / (n - 1))
    room = np.maximum(margin - critical * spread / math.sqrt(n), 0.0)
    error = sd / math.sqrt(n)
    inside = special.ndtr((room - difference) / error) - special.ndtr((-room - difference) / error)
    return float(inside.mean())


def smallest_difference(n: int, sd: float, *, power: float = 0.8, alpha: float = 0.05) -> float:
    """The true difference that the paired t-test of n seeds sees with this power."""
    from scipy.optimize import root_scalar

    _check_spread(n, sd)
    _check_share("power", power)

    def surplus(difference: float) -> float:
        return t_test_power(n, sd, difference, alpha=alpha) - power

    highest = sd
    while surplus(highest) < 0:
        highest *= 2
    return float(root_scalar(surplus, bracket=(0.0, highest), xtol=1e-9 * sd).root)


def seeds_for_difference(
    sd: float, difference: float, *, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """The fewest seeds with which the paired t-test sees the difference; None: over 1000."""
    return _fewest(lambda n: t_test_power(n, sd, difference, alpha=alpha) >= power)


def seeds_for_equivalence(
    sd: float, margin: float, *, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """The fewest seeds with which TOST accepts a true difference of 0; None: over 1000."""
    return _fewest(lambda n: equivalence_power(n, sd, margin, alpha=alpha) >= power)


def power_note(
    n: int, sd: float, margin: float | None = None, *, power: float = 0.8, alpha: float = 0.05
) -> PowerNote:
    """What n seeds can show when paired differences spread by sd."""
    smallest = smallest_difference(n, sd, power=power, alpha=alpha)
    text = f"With {n} seeds only differences above {smallest:.3g} are seen with {power:.0%} power."
    needed = None
    if margin is not None:
        needed = seeds_for_equivalence(sd, margin, power=power, alpha=alpha)
        seeds = f"more than {MOST_SEEDS}" if needed is None else str(needed)
        text += f" To show equivalence within {margin:.3g}, TOST needs {seeds} seeds."
    return PowerNote(n, sd, smallest, margin, needed, text)


def claim_p_values(
    measured: Estimate, expect: Expectation, margin: float | None
) -> tuple[float, float | None]:
    """(p of the claim's first question, p of its second), of which only one null can be true.

    greater, less: is there a difference; is it inside the margin (None without one).
    equivalent: is it inside the margin; is it beyond it on one side.
    not_greater: is it below the margin; is it above the margin.
    """
    if expect in ("greater", "less"):
        second = None if margin is None else equivalence(measured, margin).p
        return measured.p, second
    if margin is None:
        raise ValueError(f"A claim that expects {expect!r} needs a margin.")
    _check_margin(margin)
    above = measured.p_above(margin)
    if expect == "equivalent":
        beyond = min(1.0, 2 * min(above, measured.p_below(-margin)))
        return equivalence(measured, margin).p, beyond
    return measured.p_below(margin), above


def verdict(
    measured: Estimate,
    expect: Expectation,
    margin: float | None = None,
    *,
    alpha: float = 0.05,
    p_values: tuple[float, float | None] | None = None,
    family: int = 1,
) -> Decision:
    """What the seeds say about a claim fixed in advance.

    greater, less: supported or contradicted by the sign of a difference that is seen; equivalent
    if none is seen and it is shown to lie inside the margin. equivalent: equivalent if shown to
    lie inside, contradicted if shown to lie outside. not_greater: supported if shown to lie below
    the margin, contradicted if above. Otherwise inconclusive, with the seeds that would settle it.
    `p_values` are those of `claim_p_values`, adjusted for their family of so many claims.
    """
    _check_share("alpha", alpha)
    first, second = claim_p_values(measured, expect, margin) if p_values is None else p_values
    word = _decide(measured, expect, first <= alpha, second is not None and second <= alpha)
    needed = None
    if word == "inconclusive" and measured.sd > 0:
        needed = _seeds_needed(measured, expect, margin, alpha / family)
    return Decision(word, _sentence(measured, expect, margin, word, needed), needed)


def _decide(measured: Estimate, expect: Expectation, first: bool, second: bool) -> Word:
    if expect in ("greater", "less"):
        if first:
            return "supported" if (measured.mean > 0) == (expect == "greater") else "contradicted"
        return "equivalent" if second else "inconclusive"
    if first:
        return "equivalent" if expect == "equivalent" else "supported"
    return "contradicted" if second else "inconclusive"


def _seeds_needed(
    measured: Estimate, expect: Expectation, margin: float | None, level: float
) -> int | None:
    """The fewest seeds that would decide if mean and spread stayed as they are."""

    def decided(n: int) -> bool:
        more = replace(measured, n=n)
        more = replace(more, p=2 * min(more.p_above(0.0), more.p_below(0.0)))
        return any(p is not None and p <= level for p in claim_p_values(more, expect, margin))

    return _fewest(decided)


def _sentence(
    measured: Estimate, expect: Expectation, margin: float | None, word: Word, needed: int | None
) -> str:
    size = f"{measured.mean:+.3g} ({measured.level:.0%} interval {measured.low:+.3g} to "
    size += f"{measured.high:+.3g}, {measured.n} seeds"
    size += f", {measured.dropped} dropped)" if measured.dropped else ")"
    bound = "" if margin is None else f"{margin:.3g}"
    if word == "inconclusive":
        wanted = {
            "greater": "a difference of either sign",
            "less": "a difference of either sign",
            "equivalent": f"a difference inside or outside {bound}",
            "not_greater": f"a difference below or above {bound}",
        }[expect]
        missing = ""
        if measured.sd > 0:
            seeds = f"more than {MOST_SEEDS}" if needed is None else str(needed)
            missing = f" If mean and spread stay as they are, {seeds} seeds would settle it."
        return f"{size} does not show {wanted}.{missing}"
    if word == "equivalent":
        return f"{size} lies inside the margin of {bound}."
    if expect == "equivalent":
        return f"{size} lies outside the margin of {bound}."
    if expect == "not_greater":
        side = "below" if word == "supported" else "above"
        return f"{size} lies {side} the margin of {bound}."
    direction = "above" if measured.mean > 0 else "below"
    small = margin is not None and equivalence(measured, margin).equivalent
    return f"{size} is {direction} 0" + (f", but inside the margin of {bound}." if small else ".")


def _interval(difference: Estimate, level: float) -> tuple[float, float]:
    if difference.method == "sign":
        reach = 0.0 if 0.5 ** (difference.n - 1) <= 1 - level else math.inf
    else:
        quantile = float(special.stdtrit(difference.n - 1, (1 + level) / 2))
        reach = quantile * _standard_error(difference)
    return difference.mean - reach, difference.mean + reach


def _standard_error(difference: Estimate) -> float:
    return difference.sd / math.sqrt(difference.n)


def _hedges_factor(dof: int) -> float:
    """Hedges' exact factor: Gamma(f/2) / (sqrt(f/2) Gamma((f-1)/2)); undefined for f = 1."""
    if dof < 2:
        return math.nan
    return math.exp(math.lgamma(dof / 2) - math.lgamma((dof - 1) / 2)) / math.sqrt(dof / 2)


def _sign_test(positive: int, negative: int) -> float:
    n = positive + negative
    return min(1.0, 2 * float(special.bdtr(min(positive, negative), n, 0.5))) if n else 1.0


def _crossed_errors(
    difference: Float[Array, "seeds examples"],
    seed_counts: Float[Array, "draws seeds"],
    example_counts: Float[Array, "draws examples"],
) -> tuple[Float[Array, " draws"], Float[Array, " draws"], Float[Array, " draws"]]:
    """(mean, its standard error over seeds, over examples) for how often each is drawn."""
    seeds, examples = difference.shape
    per_example = seed_counts @ difference / seeds
    per_seed = example_counts @ difference.T / examples
    mean = (per_example * example_counts).sum(1) / examples
    between_seeds = (seed_counts * (per_seed - mean[:, None]) ** 2).sum(1) / (seeds - 1)
    between = (example_counts * (per_example - mean[:, None]) ** 2).sum(1) / (examples - 1)
    return mean, np.sqrt(between_seeds / seeds), np.sqrt(between / examples)


def _crossed_t(
    difference: Float[Array, "seeds examples"], resamples: int, rng: np.random.Generator
) -> Float[Array, " draws"]:
    """Resampled t-values; a draw without any spread has none."""
    seeds, examples = difference.shape
    observed, parts = difference.mean(), []
    chunk = max(1, 4_000_000 // examples)
    for start in range(0, resamples, chunk):
        draws = min(chunk, resamples - start)
        mean, over_seeds, over_examples = _crossed_errors(
            difference,
            rng.multinomial(seeds, np.full(seeds, 1 / seeds), draws).astype(float),
            rng.multinomial(examples, np.full(examples, 1 / examples), draws).astype(float),
        )
        error = np.hypot(over_seeds, over_examples)
        spread = error > ROUNDING * np.abs(difference).max()
        parts.append((mean[spread] - observed) / error[spread])
    return np.concatenate(parts)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest n from 2 to 1000 that is enough, as every larger n then is."""
    high = 2
    while not enough(high):
        if high == MOST_SEEDS:
            return None
        high = min(2 * high, MOST_SEEDS)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _equal_vectors(arms: Sequence[Float[Array, " n"]]) -> list[Float[Array, " n"]]:
    vectors = [np.asarray(arm, float) for arm in arms]
    shapes = [vector.shape for vector in vectors]
    if any(len(shape) != 1 for shape in shapes) or len(set(shapes)) != 1:
        raise ValueError(f"Expected vectors of one length, seed by seed; got shapes {shapes}.")
    _refuse_infinite(*vectors)
    return vectors


def _refuse_infinite(*arrays: Array) -> None:
    infinite = sum(int(np.isinf(array).sum()) for array in arrays)
    if infinite:
        raise ValueError(f"{infinite} values are infinite: mark a diverged run as missing (NaN).")


def _is_constant(values: Float[Array, " n"]) -> bool:
    return float(np.ptp(values)) <= ROUNDING * float(np.abs(values).max())


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def _check_margin(margin: float) -> None:
    if not 0 < margin < math.inf:
        raise ValueError(f"A margin must be above 0, got {margin}.")


def _check_spread(n: int, sd: float) -> None:
    if n < 2 or not 0 < sd < math.inf:
        raise ValueError(f"Power needs at least 2 seeds and a spread above 0, got {n} and {sd}.")
