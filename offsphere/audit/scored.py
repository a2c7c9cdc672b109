"""Pairs with a given similarity (STS): which cell's scores rank the pairs as people do?

No query asks here: all scores are compared with one another, so both norms count and the four cells
differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from offsphere.audit.norms import NULL_LEVEL
from offsphere.audit.scoring import LEVEL, How
from offsphere.audit.search import Direction
from offsphere.audit.table import Table
from offsphere.cells import shrink
from offsphere.estimate import Estimate
from offsphere.evaluation.checks import check_equal_width, checked_side
from offsphere.evaluation.intervals import draws, percentiles

if TYPE_CHECKING:
    from jaxtyping import Float

PERMUTATIONS = 199
RANKS_IN_ALL = 2**26
"""Of the bootstrap: of many pairs fewer samples are drawn."""


def scored_words(data: str, what: str = "vector") -> Direction:
    """How scored pairs are spoken of."""
    return Direction(
        data, f"{what} to {what}", what, "right", {}, further=("spearman",), examples="pairs",
        ask="pairs",
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scored:
    """Two raw vectors of each pair, and how alike they are said to be."""

    direction: Direction
    left: Float[Tensor, "n d"]
    right: Float[Tensor, "n d"]
    score: Float[Tensor, " n"]

    def __post_init__(self) -> None:
        left, right = checked_side(self.left, "left"), checked_side(self.right, "right")
        check_equal_width("left embeddings", left, "right ones", right)
        score = torch.as_tensor(self.score).double()
        if not len(left) == len(right) == len(score):
            raise ValueError(
                f"{self.direction.data}: expected as many scores as pairs, got {len(left)} left "
                f"vectors, {len(right)} right ones and {len(score)} scores."
            )
        if len(score) < 4 or bool((score == score[0]).all()) or not bool(score.isfinite().all()):
            raise ValueError(
                f"{self.direction.data}: expected at least 4 pairs with finite scores that differ."
            )
        for name, value in (("left", left), ("right", right), ("score", score)):
            object.__setattr__(self, name, value)


def measure_scored(part: Scored, how: How, table: Table) -> None:
    """Add Spearman's correlation by cell with intervals over pairs, and permuted norms."""
    words, place, n = part.direction, part.direction.place, len(part.score)
    gold = part.score.numpy()
    found = {
        cell: torch.linalg.vecdot(shrink(part.left, left), shrink(part.right, right)).numpy()
        for cell, (left, right) in how.cells.items()
    }
    times = max(100, min(how.resamples, RANKS_IN_ALL // n))
    drawn: dict[str, list[np.ndarray]] = {cell: [] for cell in found}
    for tile in draws(n, times, how.seed):
        rows = tile.numpy()
        wanted = gold[rows]
        for cell, values in found.items():
            drawn[cell].append(correlation(values[rows], wanted))
    again = {cell: torch.from_numpy(np.concatenate(x)) for cell, x in drawn.items()}
    base = float(correlation(found["cosine"], gold))
    for cell, values in found.items():
        value = float(correlation(values, gold))
        ends = percentiles(again[cell], LEVEL)
        table.add(*place, cell, words.metric, Estimate(value, *ends, n))
        gain = Estimate(0.0, 0.0, 0.0, n)  # by construction
        if cell != "cosine":
            ends = percentiles(again[cell] - again["cosine"], LEVEL)
            gain = Estimate(value - base, *ends, n)
        table.add(*place, cell, f"{words.metric}_minus_cosine", gain)
    table.add(*place, "chance", words.metric, Estimate(0.0))
    products = (part.left.norm(dim=1) * part.right.norm(dim=1)).numpy()
    spread = float(products.std() / products.mean())
    cosines = found["cosine"]
    ranks = Estimate(float(correlation(found["dot"], cosines)), n=n)
    table.add(*place, "dot", "ranks_with_cosine", ranks)
    facts = {
        "queries": float(n),
        "candidate_norm_cv": spread,
        "norm_leverage": spread * abs(cosines.mean()) / max(cosines.std(), 1e-12),
        "norm_with_score": float(correlation(products, gold)),
    }
    for name, value in facts.items():
        table.add(*place, "", name, Estimate(value, n=n))
    random = np.random.default_rng(how.seed)
    null = np.array(
        [correlation(cosines * random.permutation(products), gold) for _ in range(PERMUTATIONS)]
    )
    own = float(correlation(found["dot"], gold))
    low, high = np.quantile(null, [(1 - NULL_LEVEL) / 2, (1 + NULL_LEVEL) / 2])
    either = min((null >= own).sum(), (null <= own).sum())
    permuted = Estimate(float(null.mean()), float(low), float(high), PERMUTATIONS)
    table.add(*place, "dot", f"{words.metric}_permuted", permuted)
    p = min(1.0, 2 * (1 + float(either)) / (1 + PERMUTATIONS))
    table.add(*place, "dot", f"{words.metric}_permuted_p", Estimate(p))


def correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's, of each row; NaN where one side is constant."""
    from scipy.stats import rankdata

    x, y = (rankdata(values, axis=-1) for values in (a, b))
    x, y = (v - v.mean(-1, keepdims=True) for v in (x, y))
    spread = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(spread > 0, (x * y).sum(-1) / np.where(spread > 0, spread, 1), math.nan)
