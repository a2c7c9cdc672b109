"""The best candidates of each query among more than fit into memory, exactly.

A block of candidates is multiplied with all queries in float32, once for all exponents, and each
query keeps the best so far. Those that rounding could have put in or out are scored again in
float64 at the end, so that the lists are those of float64 products while memory does not grow with
the number of candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.cells import SMALLEST_NORM
from offsphere.evaluation.ranking import Ranking

if TYPE_CHECKING:
    from jaxtyping import Float

    Blocks = Iterable[tuple[int, Float[Tensor, "b d"]]]

SCORES_AT_ONCE = 2**22
"""Of one tile (16 MB in float32)."""
QUERIES_AT_ONCE = 2048
GROUP = 64
"""Columns of a tile whose largest score is looked at first."""
NUMBERS_AGAIN = 2**18
"""Of the vectors that are scored again at a time: 2 MB for either side, so that the cache holds
them and no fresh memory is asked for (2**22 took three times as long)."""
SPARE = 28
"""Kept beyond the wanted ones: as many may lie within rounding of the last of them."""
ROUNDING = 8.0
"""The errors of d additions stay below 8 sqrt(d) units of rounding but for a probability of 1e-13
(Higham and Mary 2019); the sure bound of d units would score far more candidates again."""


def scan(
    queries: Float[Tensor, "q d"],
    read: Callable[[], Blocks],
    exponents: Sequence[float],
    depth: int,
) -> dict[float, Ranking]:
    """The candidates of largest q . d / |d|**g by exponent g, `depth` of each query, best first.

    `read` gives (first row, raw rows) of all candidates, and is called twice.
    """
    tiles = [_Best(x, exponents, depth) for x in queries.double().split(QUERIES_AT_ONCE)]
    width = max(1, SCORES_AT_ONCE // len(tiles[0].queries))
    for start, part in _parts(read(), width):
        norms = torch.linalg.vector_norm(part, dim=1).float().clamp_min(SMALLEST_NORM)
        for tile in tiles:
            tile.offer(start, part, norms)
    for tile in tiles:
        tile.settle()
    for start, part in _parts(read(), width):
        for tile in tiles:
            tile.score_again(start, part)
    found = [tile.best() for tile in tiles]
    return {
        g: Ranking(*(torch.cat(x) for x in zip(*(best[g] for best in found), strict=True)))
        for g in exponents
    }


def _parts(blocks: Blocks, width: int) -> Iterable[tuple[int, Tensor]]:
    """(first row, raw rows) of at most so many rows."""
    for start, block in blocks:
        pieces = -(-len(block) // width)
        rows = -(-len(block) // pieces // GROUP) * GROUP
        for first in range(0, len(block), rows):
            yield start + first, block[first : first + rows]


class _Best:
    """The best candidates so far of some queries, by exponent."""

    def __init__(
        self, queries: Float[Tensor, "q d"], exponents: Sequence[float], depth: int
    ) -> None:
        self.queries, self.depth = queries, depth
        norms = queries.norm(dim=1, keepdim=True).clamp_min(SMALLEST_NORM)
        self.units = (queries / norms).float()
        rows = len(queries)
        self.scores = {g: torch.empty(rows, 0) for g in exponents}
        self.documents = {g: torch.empty(rows, 0, dtype=torch.long) for g in exponents}
        self.longest = dict.fromkeys(exponents, 0.0)
        self.exact: dict[float, Tensor] = {}
        self.order: dict[float, tuple[Tensor, Tensor]] = {}
        self.buffers = torch.empty(2, 0, 0)

    def slack(self, g: float) -> float:
        """How far a float32 score may be from the true one."""
        unit = torch.finfo(torch.float32).eps / 2
        return ROUNDING * math.sqrt(self.queries.shape[1]) * unit * self.longest[g]

    def offer(self, start: int, block: Float[Tensor, "b d"], norms: Float[Tensor, " b"]) -> None:
        """Take in those rows of a block that may belong among the best."""
        rows = len(block)
        shape = (len(self.units), rows + -rows % GROUP)
        if self.buffers.shape[1:] != shape:  # written again and again: new memory costs more
            self.buffers = torch.empty(2, *shape)
        products, scaled = self.buffers
        torch.mm(self.units, block.float().T, out=products[:, :rows])
        self.buffers[:, :, rows:] = -torch.inf
        for g, best in self.scores.items():
            scores = products
            if g:
                scores = scaled
                torch.mul(products[:, :rows], norms.pow(-g), out=scaled[:, :rows])
            self.longest[g] = max(self.longest[g], norms.pow(1 - g).max().item())
            if best.shape[1] < self.depth:  # the first rows of all
                last = scores.topk(min(self.depth, rows), dim=1).values[:, -1]
            else:
                last = best[:, self.depth - 1]
            least = (last - 2 * self.slack(g))[:, None]
            # Most groups of columns have nothing: their maxima are looked at, not every score.
            groups = scores.view(len(scores), -1, GROUP)
            query, group = (groups.amax(2) > least).nonzero().unbind(1)
            some, column = (groups[query, group] > least[query]).nonzero().unbind(1)
            if len(some):
                query, row = query[some], group[some] * GROUP + column
                self._take(g, query, row + start, scores[query, row])

    def _take(self, g: float, query: Tensor, document: Tensor, score: Tensor) -> None:
        """Merge pairs, sorted by query, into the lists."""
        count = torch.bincount(query, minlength=len(self.queries))
        place = torch.arange(len(query)) - (count.cumsum(0) - count)[query]
        shape = (len(self.queries), int(count.max()))
        scores = score.new_full(shape, -torch.inf).index_put_((query, place), score)
        documents = document.new_zeros(shape).index_put_((query, place), document)
        scores = torch.cat([self.scores[g], scores], 1)
        documents = torch.cat([self.documents[g], documents], 1)
        kept = scores.topk(min(self.depth + SPARE, scores.shape[1]), dim=1)
        self.scores[g], self.documents[g] = kept.values, documents.gather(1, kept.indices)

    def settle(self) -> None:
        """Choose what is scored again: the best, and what rounding may have put below them."""
        for g, scores in self.scores.items():
            last = scores[:, min(self.depth, scores.shape[1]) - 1]
            chosen = (scores >= (last - 2 * self.slack(g))[:, None]) & scores.isfinite()
            pairs = chosen.flatten().nonzero().flatten()
            document, order = self.documents[g].flatten()[pairs].sort()
            self.order[g] = (document, pairs[order])
            self.exact[g] = torch.full(scores.shape, -torch.inf, dtype=torch.float64)

    def score_again(self, start: int, block: Float[Tensor, "b d"]) -> None:
        """The scores in float64 of the chosen pairs whose candidates are in this block."""
        at_once = max(1, NUMBERS_AGAIN // block.shape[1])
        for g, (document, pairs) in self.order.items():
            ends = torch.searchsorted(document, torch.tensor([start, start + len(block)]))
            here = slice(*ends.tolist())
            each = self.exact[g].shape[1]
            for pair, row in zip(
                pairs[here].split(at_once), (document[here] - start).split(at_once), strict=True
            ):
                items = block[row].double()
                products = torch.linalg.vecdot(self.queries[pair // each], items)
                norms = items.norm(dim=1).clamp_min(SMALLEST_NORM)
                self.exact[g].view(-1)[pair] = products * norms.pow(-g)

    def best(self) -> dict[float, tuple[Tensor, Tensor]]:
        """The lists as float64 has them."""
        found = {}
        for g, scores in self.exact.items():
            kept = scores.topk(min(self.depth, scores.shape[1]), dim=1)
            found[g] = (kept.values, self.documents[g].gather(1, kept.indices))
        return found
