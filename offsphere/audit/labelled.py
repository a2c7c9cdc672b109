"""Labelled vectors: does each one's neighbourhood, or a clustering, know its label?

Each vector asks all others (leave one out) and their k nearest vote; k-means is compared with the
labels on raw and on normalised vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.audit.measures import Curve, add_confidence, kept_share, neighbours
from offsphere.audit.scoring import How
from offsphere.audit.search import Direction
from offsphere.audit.table import Table
from offsphere.cells import shrink
from offsphere.estimate import Estimate
from offsphere.evaluation.checks import check_classes, check_split
from offsphere.evaluation.clustering import clustering
from offsphere.evaluation.geometry import occurrence_statistics, top_items, unit
from offsphere.evaluation.intervals import clustered_mean
from offsphere.evaluation.knn import spread_ratio, vote
from offsphere.evaluation.relevance import norm_leverage

if TYPE_CHECKING:
    from jaxtyping import Float, Int

VOTERS, TEMPERATURE = 20, 0.1
MOST = 20_000
"""Of more vectors, evenly spaced ones are taken."""
MOST_CLUSTERED = 5_000


def labelled_words(data: str, what: str = "vector") -> Direction:
    """How a labelled set is spoken of."""
    return Direction(
        data, f"{what} to {what}", what, "right", {"knn": 1}, examples=f"{what}s", ask="items"
    )


@dataclass(frozen=True, eq=False)
class Labelled:
    """Raw vectors and their classes."""

    direction: Direction
    vectors: Float[Tensor, "n d"]
    labels: Int[Tensor, " n"]

    def __post_init__(self) -> None:
        check_split(self.vectors, self.labels, self.direction.data)
        check_classes(self.labels)
        step = -(-len(self.labels) // MOST)
        object.__setattr__(self, "vectors", self.vectors[::step].double())
        object.__setattr__(self, "labels", self.labels[::step])
        if len(self.labels) < 4:
            raise ValueError(
                f"{self.direction.data} has {len(self.labels)} labelled vectors: at least 4 are "
                "needed, so that each has neighbours."
            )


def measure_labelled(part: Labelled, how: How, table: Table) -> list[Curve]:
    """Add accuracies by cell with intervals over vectors, k-means, hubs and confidence."""
    words, x, labels = part.direction, part.vectors, part.labels
    place, n = words.place, len(labels)
    rows, norms = torch.arange(n), x.norm(dim=1)
    k = neighbours(n)
    found, nearest = {}, {}
    for cells in how.groups(words):
        g = how.cells[cells[0]][1]
        right, near = leave_one_out(x, labels, g)
        nearest[cells] = near[:, :k]
        found |= dict.fromkeys(cells, right)
        hubs = occurrence_statistics(torch.bincount(near[:, :k].flatten(), minlength=n), norms)
        for cell in cells:
            for name, value in hubs.items():
                table.add(*place, cell, f"hubness_{name}", Estimate(value.item()))
    for cell, right in found.items():
        more = (rows, *how.drawn)
        table.add(*place, cell, words.metric, clustered_mean(right, *more, "share"))
        change = clustered_mean(right - found["cosine"], *more, "change")
        table.add(*place, cell, f"{words.metric}_minus_cosine", change)
    by_cosine = next(near for cells, near in nearest.items() if "cosine" in cells)
    for cells, near in nearest.items():
        kept = clustered_mean(kept_share(by_cosine, near), rows, *how.drawn)
        for cell in cells:
            table.add(*place, cell, "nearest_kept", kept)
    share = torch.bincount(labels).double() / n
    table.add(*place, "chance", words.metric, Estimate(share.max().item()))
    some = slice(None, None, -(-n // MOST_CLUSTERED))
    for cell, vectors in (("cosine", unit(x)), ("dot", x)):
        agreement = clustering(vectors[some].float(), labels[some])
        table.add(*place, cell, "clustering_nmi", Estimate(agreement))
    cv = (norms.std(correction=0) / norms.mean()).item()
    facts = {"candidate_norm_cv": cv, "norm_leverage": norm_leverage(x, x), "queries": n}
    facts |= {"candidates": n, "candidates_compared": n, "hubness_neighbours": k}
    for name, value in facts.items():
        table.add(*place, "", name, Estimate(value, n=n))
    own = next(cells for cells in nearest if how.own in cells)
    chosen = norms[nearest[own][:, 0]]
    return [add_confidence(words, found[how.own], norms, chosen, rows, how, table)]


def leave_one_out(
    x: Float[Tensor, "n d"], labels: Int[Tensor, " n"], exponent: float
) -> tuple[Float[Tensor, " n"], Int[Tensor, "n k"]]:
    """Whether the k nearest others vote for each vector's own class, and who they are."""
    voters = min(VOTERS, len(x) - 1)
    scores, nearest = top_items(
        unit(x), shrink(x, float(exponent)), voters, exclude=torch.arange(len(x))
    )
    temperature = TEMPERATURE * spread_ratio(x, voters, exponent)
    votes = vote(scores, labels[nearest].long(), temperature, int(labels.max()) + 1)
    return (votes.argmax(1) == labels).double(), nearest


def numbered(labels: Sequence[str]) -> Int[Tensor, " n"]:
    """Labels of any kind as numbers from 0, in the order of their names."""
    number = {label: k for k, label in enumerate(sorted(set(labels)))}
    return torch.tensor([number[label] for label in labels])
