"""Where the right candidates stand among all: the core of recall at k, ties counted fairly.

The query's own norm multiplies all its scores alike and never changes its ranking, so only the
candidate side's exponent counts, and cells that agree on it tie by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from offsphere.names import CORNERS

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SCORES_AT_ONCE = 2**24
"""Scores of one tile: whole rows of queries, 128 MB."""

Exponents = tuple[float, float]
"""(image, text) exponents of a cell."""


class Standing(NamedTuple):
    """Where each query's best right candidate stands among all candidates."""

    above: Int[Tensor, " q"]
    """Candidates with a larger score: all of them wrong."""
    tied: Int[Tensor, " q"]
    """Candidates with the same score, itself included."""
    right: Int[Tensor, " q"]
    """How many of the tied ones are right."""

    def hit(self, k: int) -> Float[Tensor, " q"]:
        """Probability that a right candidate is among the k best, ties broken at random."""
        drawn = (k - self.above).clamp_min(0).minimum(self.tied).double()
        tied, wrong = self.tied.double(), (self.tied - self.right).double()
        all_wrong = _log_choose(wrong, drawn.minimum(wrong)) - _log_choose(tied, drawn)
        return torch.where(drawn > wrong, 1.0, 1 - all_wrong.exp())

    def rank(self) -> Float[Tensor, " q"]:
        """Expected rank of the first right candidate, from 1, ties broken at random."""
        return self.above + (self.tied + 1) / (self.right + 1).double()


def cells_to_score(own: Exponents) -> dict[str, Exponents]:
    """The corners of the square, and `own` in front if these exponents are inside it."""
    own = (float(own[0]), float(own[1]))
    inside = {} if own in CORNERS.values() else {f"{own[0]:.4g},{own[1]:.4g}": own}
    return inside | CORNERS


def same_ranking(
    cells: Mapping[str, Exponents], candidates: Literal["left", "right"]
) -> list[tuple[str, ...]]:
    """Groups of cells that tie by construction: they agree on the candidate side's exponent."""
    side = ("left", "right").index(candidates)
    groups: dict[float, list[str]] = {}
    for name, exponents in cells.items():
        groups.setdefault(float(exponents[side]), []).append(name)
    return [tuple(names) for names in groups.values()]


def standings(
    queries: Float[Tensor, "q d"],
    candidates: Float[Tensor, "c d"],
    pair_query: Int[Tensor, " p"],
    pair_candidate: Int[Tensor, " p"],
) -> Standing:
    """Where each query's best right candidate stands; pair p says which candidate is right.

    Embeddings in float64 give scores that are compared in float32: equal embeddings then have
    equal scores, whatever the order in which a kernel adds.
    """
    pair_query, order = pair_query.sort(stable=True)
    pair_candidate = pair_candidate[order]
    rows = max(1, SCORES_AT_ONCE // len(candidates))
    starts = torch.arange(0, len(queries), rows, device=queries.device)
    edges = [*torch.searchsorted(pair_query, starts).tolist(), len(pair_query)]
    tiles = []
    for tile, start in enumerate(starts.tolist()):
        scores = (queries[start : start + rows] @ candidates.T).float()
        pairs = slice(edges[tile], edges[tile + 1])
        tiles.append(_standing_of_tile(scores, pair_query[pairs] - start, pair_candidate[pairs]))
    return Standing(*(torch.cat(counts).cpu() for counts in zip(*tiles, strict=True)))


def _standing_of_tile(
    scores: Float[Tensor, "q c"], pair_query: Int[Tensor, " p"], pair_candidate: Int[Tensor, " p"]
) -> Standing:
    right_scores = scores[pair_query, pair_candidate]
    best = scores.new_full((len(scores),), -torch.inf)
    best = best.scatter_reduce(0, pair_query, right_scores, "amax")
    is_best = (right_scores == best[pair_query]).long()
    return Standing(
        (scores > best[:, None]).sum(1),
        (scores == best[:, None]).sum(1),
        torch.zeros_like(best, dtype=torch.long).scatter_add(0, pair_query, is_best),
    )


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
