"""What it costs to store candidates as int8 or as bits, under each cell.

int8 is the scalar quantisation of vector stores: each feature's range over the candidates in 255
steps, queries in full. Binary keeps the sign of each feature on both sides, so that the score is
minus the Hamming distance: it knows no norms, whatever the cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.audit.norms import PLACES, SCORES_AT_ONCE, worth
from offsphere.audit.scoring import LEVEL, How, candidate_exponent
from offsphere.audit.search import Search
from offsphere.audit.table import Table
from offsphere.estimate import Estimate
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.intervals import clustered_mean

if TYPE_CHECKING:
    from jaxtyping import Float

STEPS = 255


def measure_quantised(search: Search, how: How, table: Table) -> None:
    """Add the metric that decides under each cell with quantised candidates, and the difference."""
    words, queries = search.direction, unit(search.queries).float()
    for cells in how.groups(words):
        items = search.candidates(candidate_exponent(search, how, cells[0])).float()
        full = _worth(search, queries, items)
        kinds = {
            "int8": _worth(search, queries, int8(items)),
            "binary": _worth(search, signs(queries), signs(items)),
        }
        for kind, values in kinds.items():
            name = f"{words.metric}_{kind}"
            change = clustered_mean(
                values - full, search.example, LEVEL, how.resamples, how.seed, "change"
            )
            for cell in cells:
                table.add(*words.place, cell, name, Estimate(values.mean().item()))
                table.add(*words.place, cell, f"{name}_minus_full", change)


def int8(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The rows as they come back from int8: each feature in 255 steps of its range."""
    low, high = x.amin(0), x.amax(0)
    step = ((high - low) / STEPS).clamp_min(torch.finfo(x.dtype).tiny)
    return low + ((x - low) / step).round() * step


def signs(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """1 where a feature is above 0, else -1."""
    return torch.where(x > 0, 1.0, -1.0)


def _worth(search: Search, queries: Tensor, items: Tensor) -> Float[Tensor, " q"]:
    parts = []
    for rows in torch.arange(len(queries)).split(max(1, SCORES_AT_ONCE // len(items))):
        best = (queries[rows] @ items.T).topk(min(PLACES, len(items)), dim=1).indices
        parts.append(worth(search, best, rows))
    return torch.cat(parts)
