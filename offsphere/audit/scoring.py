"""A search scored with every cell: values, intervals over examples, differences to cosine.

Examples (an image with its captions, a query) are drawn again with replacement, the same ones for
every cell, so that differences are paired. Few right answers, few wrong ones or few changed ones
have closed intervals (`offsphere.evaluation.intervals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offsphere.audit.scan import scan
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Table
from offsphere.cells import Cell
from offsphere.estimate import Estimate
from offsphere.evaluation import ranking
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.intervals import change, cluster_sums, draws, share, zero_mean_p
from offsphere.evaluation.retrieval import (
    Exponents,
    Standing,
    cells_to_score,
    same_ranking,
    standings,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LEVEL = 0.95


class How(NamedTuple):
    """What everything is scored with, and how often it is drawn again."""

    cells: dict[str, Exponents]
    own: str
    """The one of the cells that gives the headline."""
    resamples: int = 1000
    seed: int = 0

    @property
    def drawn(self) -> tuple[float, int, int]:
        """Level, samples and seed of intervals."""
        return LEVEL, self.resamples, self.seed

    def groups(self, direction: Direction) -> list[tuple[str, ...]]:
        """The cells, those together that tie by construction."""
        if direction.ask == "pairs":
            return [(cell,) for cell in self.cells]
        return same_ranking(self.cells, direction.side)


def cells_of(trained: Exponents, eval_cell: str | None) -> tuple[dict[str, Exponents], str]:
    """The cells to score with, and the name of the one for the headline."""
    own = trained
    if eval_cell is not None:
        left, right = Cell(eval_cell).exponents
        own = (float(left), float(right))
    cells = cells_to_score(trained) | cells_to_score(own)
    return cells, next(name for name, exponents in cells.items() if exponents == own)


class Outcomes(NamedTuple):
    """What each query got, by metric, between 0 and 1; equal scores count their expected share."""

    values: dict[str, Float[Tensor, " q"]]
    rank: Float[Tensor, " q"]
    """Expected rank of the first right candidate; infinite beyond the list of a graded search."""
    best: ranking.Ranking
    """The candidates of largest score."""


def outcomes(search: Search, exponents: Sequence[float]) -> dict[float, Outcomes]:
    """What each query gets from candidates that are shrunk by each of these exponents."""
    words, found = search.direction, {}
    for exponent, best in rankings(search, exponents).items():
        values: dict[str, Tensor] = {}
        if words.graded:
            values = ranking.outcomes(best, search.relevant())._asdict()
            standing = _standing_in(best, search)
        else:
            candidates = search.candidates(exponent)
            pairs = search.pair_query, search.pair_item
            standing = standings(unit(search.queries), candidates, *pairs)
        values |= {name: standing.hit(k) for name, k in words.recalls.items()}
        if words.class_recall is not None:
            values[words.class_recall] = values[words.metric]
        rank = torch.where(standing.tied > 0, standing.rank(), torch.inf)
        found[exponent] = Outcomes(values, rank, best)
    return found


def rankings(search: Search, exponents: Sequence[float]) -> dict[float, ranking.Ranking]:
    """Each query's best candidates by exponent, in one pass unless a candidate has many rows."""
    depth = min(ranking.DEPTH, search.count)
    if search.item_owner is None:
        return scan(search.queries, lambda: search.blocks("scoring"), exponents, depth)
    found = {}
    for g in exponents:
        whole = [(0, search.candidates(g))]
        found[g] = scan(search.queries, lambda whole=whole: whole, (0.0,), depth)[0.0]
    return found


def _standing_in(best: ranking.Ranking, search: Search) -> Standing:
    """Where the first right candidate stands in its query's list; scores compare in float32.

    Ties beyond the list's end count for nothing; nor does a query whose list has no right one.
    """
    scores, right = best.scores.float(), search.grades_of(best.documents) > 0
    first = scores.where(right, -torch.inf).amax(1, keepdim=True)
    tied = (scores == first) & first.isfinite()
    return Standing((scores > first).sum(1), tied.sum(1), (tied & right).sum(1))


def score(search: Search, how: How, table: Table) -> dict[str, Outcomes]:
    """Add every cell's metrics to the table, with chance beside them; return the outcomes."""
    words, n = search.direction, len(search.example.unique())
    ties = {cell: group for group in how.groups(words) for cell in group}
    exponent = {group: candidate_exponent(search, how, group[0]) for group in ties.values()}
    found = outcomes(search, list(exponent.values()))
    by_group = {group: found[g] for group, g in exponent.items()}
    base = by_group[ties["cosine"]]
    for metric in words.metrics:
        label = search.pair_item if metric == words.class_recall else None
        columns = {group: found.values[metric] for group, found in by_group.items()}
        drawn = _drawn(columns, search.example, label, how)
        values = {group: _mean(x, label) for group, x in columns.items()}
        for cell, group in ties.items():
            table.add(*words.place, cell, metric, share(values[group], drawn[group], n, LEVEL))
            difference = Estimate(0.0, 0.0, 0.0, n)  # by construction
            if "cosine" not in group:
                # What each example adds to the difference; the mean over examples is the latter.
                # Classes weigh examples by their size: whether an answer changed is the same.
                total, count = cluster_sums(columns[group] - base.values[metric], search.example)
                changes = total * (n / len(search.queries))
                gain = values[group] - values[ties["cosine"]]
                again = drawn[group] - drawn[ties["cosine"]]
                difference = change(gain, changes, again, LEVEL)
                if metric == words.metric and label is None:
                    p = zero_mean_p(changes, count.max().item() * n / len(search.queries))
                    table.add(*words.place, cell, f"{metric}_minus_cosine_p", Estimate(p))
            table.add(*words.place, cell, f"{metric}_minus_cosine", difference)
    for name, guessed in by_guessing(search).items():
        for metric, value in guessed.items():
            table.add(*words.place, name, metric, Estimate(value))
    return {cell: by_group[group] for cell, group in ties.items()}


def candidate_exponent(search: Search, how: How, cell: str) -> float:
    """A cell's exponent on the side that answers, the only one that can change a ranking."""
    return float(how.cells[cell][("left", "right").index(search.direction.side)])


def by_guessing(search: Search) -> dict[str, dict[str, float]]:
    """The metrics of a random ranking and, for classes, of always naming the largest one."""
    words = search.direction
    right = torch.bincount(search.pair_query, minlength=len(search.queries))
    everything = torch.full_like(right, search.count)
    random = Standing(torch.zeros_like(right), everything, right)
    chance = {name: random.hit(k).mean().item() for name, k in words.recalls.items()}
    if words.graded:
        chance |= _graded_chance(search, random)
    if words.class_recall is None:
        return {"chance": chance}
    chance[words.class_recall] = chance[words.metric]
    largest = torch.bincount(search.pair_item).max().item() / len(search.queries)
    return {"chance": chance, "majority": {words.metric: largest}}


def _mean(values: Float[Tensor, " q"], label: Int[Tensor, " q"] | None) -> float:
    """The mean over queries, or over the means of the classes."""
    if label is None:
        return values.mean().item()
    count = torch.bincount(label).double()
    means = torch.bincount(label, weights=values.double()) / count
    return means[count > 0].mean().item()


def _drawn(
    columns: Mapping[tuple[str, ...], Float[Tensor, " q"]],
    example: Int[Tensor, " q"],
    label: Int[Tensor, " q"] | None,
    how: How,
) -> dict[tuple[str, ...], Float[Tensor, " times"]]:
    """The metric on examples drawn with replacement, the same ones for each group of cells."""
    parts: dict[tuple[str, ...], list[Tensor]] = {group: [] for group in columns}
    sums = {group: cluster_sums(x, example) for group, x in columns.items()}
    examples = len(next(iter(sums.values()))[0])
    for tile in draws(examples, how.resamples, how.seed):
        for group, (total, count) in sums.items():
            if label is None:
                parts[group].append(total[tile].sum(1) / count[tile].sum(1))
            else:
                parts[group].append(_class_means(columns[group], label, tile))
    return {group: torch.cat(values) for group, values in parts.items()}


def _class_means(
    values: Float[Tensor, " q"], label: Int[Tensor, " q"], tile: Int[Tensor, "b q"]
) -> Float[Tensor, " b"]:
    """For each row of drawn queries the mean of the classes' means; a class not drawn is left out.

    Each query must be an example of its own.
    """
    classes = int(label.max()) + 1
    place = (torch.arange(len(tile))[:, None] * classes + label[tile]).flatten()
    count = torch.bincount(place, minlength=len(tile) * classes).double()
    right = torch.bincount(place, values[tile].flatten(), minlength=len(count))
    return (right / count).view(len(tile), classes).nanmean(1)


def _graded_chance(search: Search, random: Standing) -> dict[str, float]:
    """trec_eval's metrics of a random ranking: each place holds the mean grade."""
    discount = 1 / torch.arange(2, min(10, search.count) + 2).double().log2()
    grades = torch.tensor([sum(x.values()) for x in search.relevant()]).double()
    gained = grades / search.count * discount.sum()
    first = [random.hit(k) - random.hit(k - 1) if k > 1 else random.hit(1) for k in range(1, 11)]
    return {
        "ndcg10": (gained / search.ideal).mean().item(),
        "recall100": min(ranking.DEPTH / search.count, 1.0),
        "mrr10": sum((x / k).mean().item() for k, x in enumerate(first, 1)),
    }
