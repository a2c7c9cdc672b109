"""Statistics of a few paired seeds: intervals, equivalence, families. No torch.

Every contrast (a difference, a main effect, an interaction) is first one number per seed, so one
t-interval serves them all. NaN is a missing run: its seed is dropped and counted in the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import special

from offsphere.estimate import Estimate

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray as Array

LEVEL = 0.95
ROUNDING = 1e-12
"""Spread below this share of the data's size is rounding, not variation."""


@dataclass(frozen=True)
class OverSeeds(Estimate):
    """The mean of one number per seed, its interval and its two-sided test against 0.

    Where the seeds do not differ at all a t-test does not exist; then `method` is `sign`: p is
    the exact sign test's, and the interval the order statistics', which is unbounded until there
    are enough seeds for `level` (6 for 95 %).
    """

    level: float = LEVEL
    sd: float = 0.0
    """Standard deviation over seeds (n - 1); n is the number of complete seeds."""
    dropped: int = 0
    """Seeds left out because a run is missing or gave NaN."""
    p: float = 1.0
    effect_size: float = math.nan
    """Cohen's d_z = mean / sd with Hedges' exact small-sample factor; NaN for 2 seeds or sd 0."""
    sign_p: float = 1.0
    """The exact two-sided sign test, which assumes no normality; seeds that tie are left out."""
    method: Literal["t", "sign"] = "t"
    examples: int = 0
    """Test examples that the interval covers too; 0: it takes the test set as given."""
    error: float | None = None
    """The standard error, if it is not the one over seeds, sd / sqrt(n)."""
    dof: float | None = None
    """The degrees of freedom, if they are not n - 1."""
    example_error: float = 0.0
    """The part of the standard error that more seeds leave as it is."""
    unit: str = "seed"
    """What n counts: seeds, unless said otherwise."""

    @property
    def count(self) -> str:
        """How many there are, in words."""
        return f"{self.n} {self.unit}" + "s" * (self.n != 1)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean."""
        return self.sd / math.sqrt(self.n) if self.error is None else self.error

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the standard error."""
        return self.n - 1 if self.dof is None else self.dof

    def interval(self, level: float) -> tuple[float, float]:
        """The bounds at another level."""
        if self.method == "sign":
            reach = 0.0 if 0.5 ** (self.n - 1) <= 1 - level else math.inf
        else:
            quantile = float(special.stdtrit(self.freedom, (1 + level) / 2))
            reach = quantile * self.standard_error
        return self.value - reach, self.value + reach

    def p_above(self, bound: float) -> float:
        """One-sided p of the hypothesis that the mean is at most `bound`."""
        if self.method == "sign":
            return 0.5**self.n if self.value > bound else 1.0
        return float(special.stdtr(self.freedom, -(self.value - bound) / self.standard_error))

    def p_below(self, bound: float) -> float:
        """One-sided p of the hypothesis that the mean is at least `bound`."""
        if self.method == "sign":
            return 0.5**self.n if self.value < bound else 1.0
        return float(special.stdtr(self.freedom, (self.value - bound) / self.standard_error))


@dataclass(frozen=True)
class TwoByTwo:
    """What normalising each side does, in the square of the four corner cells."""

    left: OverSeeds
    """Mean of the left-normalised cells minus mean of the others."""
    right: OverSeeds
    interaction: OverSeeds
    """Effect of normalising left where right is normalised, minus where it is not."""


def contrast(conditions: Sequence[Float[Array, " seeds"]], weights: Sequence[float]) -> OverSeeds:
    """The weighted sum of conditions, seed by seed; a seed that lacks one of them is dropped."""
    stacked = np.stack(_equal_vectors(conditions))
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
        reach = 0.0 if 0.5 ** (n - 1) <= 1 - LEVEL else math.inf
        return OverSeeds(
            mean, mean - reach, mean + reach, n, LEVEL, 0.0, dropped, sign_p, math.nan, sign_p,
            "sign",
        )  # fmt: skip
    t = mean / (sd / math.sqrt(n))
    reach = float(special.stdtrit(n - 1, (1 + LEVEL) / 2)) * sd / math.sqrt(n)
    p = 2 * float(special.stdtr(n - 1, -abs(t)))
    return OverSeeds(
        mean, mean - reach, mean + reach, n, LEVEL, sd, dropped, p,
        mean / sd * _hedges_factor(n - 1), sign_p, "t",
    )  # fmt: skip


def estimate(values: Float[Array, " seeds"]) -> OverSeeds:
    """The mean of one number per seed (a difference, an AUROC minus 0.5), with its t-interval."""
    return contrast([values], [1.0])


def paired_difference(
    treated: Float[Array, " seeds"], control: Float[Array, " seeds"]
) -> OverSeeds:
    """treated - control, where the same position is the same seed."""
    return contrast([treated, control], [1.0, -1.0])


def two_by_two(
    cosine: Float[Array, " seeds"],
    qnorm: Float[Array, " seeds"],
    dnorm: Float[Array, " seeds"],
    dot: Float[Array, " seeds"],
) -> TwoByTwo:
    """Main effects and interaction of normalising left and right; a seed needs all four cells."""
    four = [cosine, qnorm, dnorm, dot]
    return TwoByTwo(
        left=contrast(four, [0.5, 0.5, -0.5, -0.5]),
        right=contrast(four, [0.5, -0.5, 0.5, -0.5]),
        interaction=contrast(four, [1.0, -1.0, -1.0, 1.0]),
    )


def equivalence_p(difference: OverSeeds, margin: float) -> float:
    """p of the two one-sided tests (TOST) that a contrast lies inside (-margin, margin).

    It is at most alpha exactly where the 1 - 2 alpha interval lies inside the margin.
    """
    check_margin(margin)
    return max(difference.p_above(-margin), difference.p_below(margin))


def holm(p_values: Float[Array, " tests"] | Sequence[float]) -> Float[Array, " tests"]:
    """Holm's adjusted p-values, in the order given."""
    p = np.asarray(p_values, float)
    if p.ndim != 1 or not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError(f"Expected p-values between 0 and 1, got {p.tolist()}.")
    # The smallest p is multiplied by the number of tests, the next by one less, and so on; none may
    # be smaller after the adjustment than one that was smaller before it.
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


def crossed(parts: Sequence[Float[Array, "seeds examples"]]) -> OverSeeds:
    """The sum of the parts' means, with an interval that covers new seeds and new examples.

    A part is a contrast per seed and example on one test set; parts on different test sets share
    seeds, not examples. A seed that lacks a part is a row of NaN there.

    With x[s, e] = mean + seed[s] + example[e] + rest[s, e] the variance of the mean is
    (variance over row means) / seeds + (variance over column means) / examples, in which the rest
    is counted twice, so it is taken out once. Degrees of freedom by Satterthwaite. Neither a
    t-interval over seeds (the test set is taken as given) nor one over examples (the trained
    models are) covers both; other data sets are covered by none of them.
    """
    matrices = [np.asarray(part, float) for part in parts]
    if any(x.ndim != 2 for x in matrices) or len({len(x) for x in matrices}) != 1:
        shapes = [x.shape for x in matrices]
        raise ValueError(f"Expected matrices, seeds x examples, of the same seeds; got {shapes}.")
    _refuse_infinite(*matrices)
    missing = np.stack([np.isnan(x).all(axis=1) for x in matrices]).any(axis=0)
    kept = [x[~missing] for x in matrices]
    if single := sum(int(np.isnan(x).sum()) for x in kept):
        raise ValueError(
            f"{single} single outcomes are NaN: a seed's run is there with all its examples, or is "
            "missing as a whole (a row of NaN)."
        )
    seeds, examples = int((~missing).sum()), [x.shape[1] for x in kept]
    if seeds < 2 or min(examples) < 2:
        raise ValueError(
            f"Expected at least 2 seeds and 2 examples, got {seeds} and {min(examples)} "
            f"({int(missing.sum())} seeds dropped)."
        )
    rows = sum(x.mean(axis=1) for x in kept)
    found = replace(contrast([np.asarray(rows)], [1.0]), dropped=int(missing.sum()))
    over_seeds = found.sd**2 / seeds
    columns = [x.mean(axis=0) for x in kept]
    over_examples = [float(c.var(ddof=1)) / len(c) for c in columns]
    rest = 0.0
    for x, column in zip(kept, columns, strict=True):
        left = x - x.mean(axis=1, keepdims=True) - column + x.mean()
        rest += float((left**2).sum()) / ((seeds - 1) * (x.shape[1] - 1)) / x.size
    total = over_seeds + sum(over_examples)
    # Row means hold seed + rest / examples, column means example + rest / seeds: each of the two
    # variances already has the whole variance of the rest in the mean, so one of them goes. The
    # difference can come out below either part by chance; then the larger part is the safe one.
    variance = max(over_seeds, sum(over_examples), total - rest)
    if math.sqrt(variance) <= ROUNDING * max(float(np.abs(x).max()) for x in kept):
        return replace(found, examples=sum(examples))
    # Satterthwaite: a sum of variances has the degrees of freedom at which its own variance is that
    # of one variance. Few seeds and many examples must not count as many seeds, hence the floor.
    spread = over_seeds**2 / (seeds - 1)
    spread += sum(v**2 / (e - 1) for v, e in zip(over_examples, examples, strict=True))
    found = replace(
        found,
        method="t",
        examples=sum(examples),
        error=math.sqrt(variance),
        dof=max(variance**2 / spread, seeds - 1.0),
        example_error=math.sqrt(max(sum(over_examples) - rest, 0.0)),
    )
    low, high = found.interval(LEVEL)
    p = 2 * min(found.p_above(0.0), found.p_below(0.0))
    return replace(found, low=low, high=high, p=min(p, 1.0))


def correlation(x: Float[Array, " n"], y: Float[Array, " n"]) -> Estimate:
    """Pearson's r across data sets, such as Cohen's d of the norms against the gain, with the 95 %
    interval of Fisher's z."""
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
        return Estimate(r, r, r, n)
    reach = special.ndtri(0.975) / math.sqrt(n - 3)
    return Estimate(r, math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach), n)


def _hedges_factor(dof: int) -> float:
    """Hedges' exact factor: Gamma(f/2) / (sqrt(f/2) Gamma((f-1)/2)); undefined for f = 1."""
    if dof < 2:
        return math.nan
    return math.exp(math.lgamma(dof / 2) - math.lgamma((dof - 1) / 2)) / math.sqrt(dof / 2)


def _sign_test(positive: int, negative: int) -> float:
    n = positive + negative
    return min(1.0, 2 * float(special.bdtr(min(positive, negative), n, 0.5))) if n else 1.0


def _equal_vectors(conditions: Sequence[Float[Array, " n"]]) -> list[Float[Array, " n"]]:
    vectors = [np.asarray(condition, float) for condition in conditions]
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


def check_share(name: str, value: float) -> None:
    """Refuse a number that is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def check_margin(margin: float) -> None:
    """Refuse a margin that is not above 0."""
    if not 0 < margin < math.inf:
        raise ValueError(f"A margin must be above 0, got {margin}.")
