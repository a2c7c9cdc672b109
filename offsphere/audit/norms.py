"""Do norms carry relevance? Cohen's d and rankings, each beside the same norms permuted.

Permuting the norms among the candidates keeps their spread and every direction, and takes away what
they say. If they say nothing, the measured value is one of many that a permutation could have
given: that is the test, whatever the number of queries. Beside it stands how norms
go with the length of texts and with how common their tokens are.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offsphere.audit.scoring import LEVEL, How
from offsphere.audit.search import Search
from offsphere.audit.table import Table
from offsphere.estimate import Estimate
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.intervals import clustered_mean, draws, percentiles

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PERMUTATIONS = 999
"""Of the norms alone, for Cohen's d."""
RANKINGS = (19, 99)
"""With permuted norms: at least and at most so many, as the number of scores allows. Fewer than 200
have no 99 % of their own: mean and spread, and Student's t for one more, stand for the others."""
SCORES_IN_ALL = 2**30
SCORES_AT_ONCE = 2**23
PLACES = 10
NULL_LEVEL = 0.99
"""Of the range that permuted norms give; outside of it norms are said to carry relevance."""


class Norms(NamedTuple):
    """The norms of some candidates under a name."""

    name: str
    values: Float[Tensor, " n"]


class TextFacts(NamedTuple):
    """What the texts of a side are like, as the encoder got them."""

    length: Int[Tensor, " n"]
    """Tokens of each text, cut where the encoder cuts."""
    frequency: Float[Tensor, " n"]
    """Mean over a text's tokens of the logarithm of how often each comes on its side."""


def measure_relevance(search: Search, how: How, table: Table) -> list[Norms]:
    """Add Cohen's d of right candidates against idle ones, and its null from permuted norms.

    Returned are the norms of either kind, for a chart.
    """
    place, norms = search.direction.place, search.norms.numpy()
    pair_query, pair_item = search.pair_query.numpy(), search.pair_item.numpy()
    wanted, at = np.unique(pair_item, return_inverse=True)
    if search.idle is None:
        idle = np.setdiff1d(np.arange(len(norms)), wanted, assume_unique=True)
    else:
        idle = search.idle.numpy()
    pool = norms[np.concatenate([wanted, idle])]
    if min(len(wanted), len(idle)) < 2 or np.ptp(pool) <= 1e-6 * pool.max():
        return []
    kinds = [
        Norms("answers", torch.from_numpy(norms[wanted])),
        Norms("answers nobody", torch.from_numpy(norms[idle])),
    ]
    pool = pool - pool.mean()  # sums of squares lose no digits then
    apart = _Apart(pool)
    d = apart.d(np.arange(len(wanted)))
    random = np.random.default_rng(how.seed)
    null = np.array(
        [
            apart.d(random.choice(len(pool), len(wanted), replace=False, shuffle=False))
            for _ in range(PERMUTATIONS)
        ]
    )
    fixed = _Apart(pool[len(wanted) :])
    again = []
    example = search.example.unique(return_inverse=True)[1].numpy()
    for tile in draws(int(example.max()) + 1, how.resamples, how.seed):
        for drawn in tile.numpy():
            asked = np.zeros(int(example.max()) + 1, dtype=bool)
            asked[drawn] = True
            kept = np.unique(at[asked[example[pair_query]]])
            again.append(fixed.beside(pool[kept]) if len(kept) > 1 else math.nan)
    ends = percentiles(torch.tensor(again, dtype=torch.float64), LEVEL)
    tail = (1 - NULL_LEVEL) / 2
    low, high = np.quantile(null, [tail, 1 - tail])
    facts = {
        "cohens_d": Estimate(d, *ends, len(search.example.unique())),
        "cohens_d_permuted": Estimate(float(null.mean()), float(low), float(high), PERMUTATIONS),
        "cohens_d_p": Estimate((1 + float((abs(null) >= abs(d)).sum())) / (1 + PERMUTATIONS)),
        "candidates_right": Estimate(len(wanted)),
        "candidates_idle": Estimate(len(idle)),
    }
    for name, value in facts.items():
        table.add(*place, "", name, value)
    return kinds


class _Apart:
    """Cohen's d of some values against the others, from sums, so that a permutation is quick."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.n = values, len(values)
        self.sum, self.squares = values.sum(), (values**2).sum()

    def d(self, rows: np.ndarray) -> float:
        """Of these rows against all others, as `geometry.cohens_d` has it."""
        some, m = self.values[rows], len(rows)
        one, squares = some.sum(), (some**2).sum()
        rest = self.n - m
        return _d(one, squares, m, self.sum - one, self.squares - squares, rest)

    def beside(self, some: np.ndarray) -> float:
        """Of other values against all of these."""
        return _d(some.sum(), (some**2).sum(), len(some), self.sum, self.squares, self.n)


def _d(a: float, a2: float, n: int, b: float, b2: float, m: int) -> float:
    within = a2 - a * a / n + b2 - b * b / m
    return float((a / n - b / m) / math.sqrt(max(within, 1e-300) / (n + m - 2)))


def measure_permuted(search: Search, how: How, table: Table) -> None:
    """Add what keeping the norms gives when they are permuted among the candidates."""
    from scipy import stats

    words = search.direction
    items, queries = search.candidates(0.0), unit(search.queries).float()
    norms = items.norm(dim=1)
    if len(norms) < 2 or (norms.max() - norms.min()) <= 1e-6 * norms.max():
        return
    least, most = RANKINGS
    times = max(least, min(most, SCORES_IN_ALL // (len(queries) * len(items))))
    random = torch.Generator().manual_seed(how.seed)
    dealt = [norms, *(norms[torch.randperm(len(norms), generator=random)] for _ in range(times))]
    columns = torch.stack(dealt).float()
    directions, parts = unit(items).float(), []
    for rows in torch.arange(len(queries)).split(max(1, SCORES_AT_ONCE // len(items))):
        cosines = queries[rows] @ directions.T
        scores = torch.empty_like(cosines)  # written again: small results between large ones
        told = []  # split the heap, and 99 times this size would not come back
        for x in columns:
            best = torch.mul(cosines, x, out=scores).topk(min(PLACES, len(items)), dim=1).indices
            told.append(worth(search, best, rows))
        parts.append(torch.stack(told))
    values = torch.cat(parts, 1)
    own, null = values[0], values[1:].mean(1)
    mean, spread = null.mean().item(), null.std().item() * math.sqrt(1 + 1 / times)
    reach = float(stats.t.ppf((1 + NULL_LEVEL) / 2, times - 1)) * spread
    apart = abs(own.mean().item() - mean)
    p = 2 * float(stats.t.sf(apart / spread, times - 1)) if spread else float(apart < 1e-12)
    gain = clustered_mean(
        own - values[1:].mean(0), search.example, LEVEL, how.resamples, how.seed, "change"
    )
    facts = {
        "permuted": Estimate(mean, max(0.0, mean - reach), min(1.0, mean + reach), times),
        "minus_permuted": gain,
        "permuted_p": Estimate(max(p, 1 / (1 + PERMUTATIONS))),  # no tail is known so far out
    }
    for name, value in facts.items():
        table.add(*words.place, "dot", f"{words.metric}_{name}", value)


def worth(search: Search, best: Int[Tensor, "r k"], rows: Int[Tensor, " r"]) -> Float[Tensor, " r"]:
    """nDCG@10 of some queries' best candidates, or whether the first is right if nothing is
    graded."""
    grades = search.grades_of(best, rows).double()
    if not search.direction.graded:
        return (grades[:, 0] > 0).double()
    discount = 1 / torch.arange(2, grades.shape[1] + 2).double().log2()
    return (grades * discount).sum(1) / search.ideal[rows]


def measure_texts(
    place: tuple[str, str], side: str, norms: Tensor, texts: TextFacts, table: Table
) -> None:
    """Add the rank correlation of norms with the length and the commonness of texts."""
    from scipy import stats

    for name, values in texts._asdict().items():
        x, y = norms.double().numpy(), values.double().numpy()
        if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
            continue
        rho = float(np.asarray(stats.spearmanr(x, y))[0])
        # Fisher's z, with the larger variance that ranks have (Bonett and Wright 2000).
        error = math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
        reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * error
        z = math.atanh(max(min(rho, 1 - 1e-12), -1 + 1e-12))
        found = Estimate(rho, math.tanh(z - reach), math.tanh(z + reach), len(x))
        table.add(*place, "", f"norm_{side}_with_{name}", found)
