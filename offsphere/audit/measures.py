"""What norms look like, what they say about right and wrong answers, what remedies change.

Answers whose right candidate ties with a wrong one are neither right nor wrong: they are left out
of the comparison of right and wrong answers, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from offsphere.audit.norms import PLACES, TextFacts, measure_texts, worth
from offsphere.audit.scoring import LEVEL, How, Outcomes
from offsphere.audit.search import LEAST_EXAMPLES, Direction, Search
from offsphere.audit.table import HALF, Problem, Table
from offsphere.estimate import Estimate
from offsphere.evaluation import geometry
from offsphere.evaluation.checks import check_lengths
from offsphere.evaluation.confidence import auroc
from offsphere.evaluation.intervals import clustered_mean, draws, percentiles, share
from offsphere.evaluation.relevance import norm_leverage
from offsphere.evaluation.similarity import (
    CellSimilarity,
    Centred,
    Csls,
    QueryZScore,
    Similarity,
    TopRemoved,
    Whitened,
)
from offsphere.evaluation.similarity import similarity as named
from offsphere.names import CORNERS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

NEIGHBOURS = 10
"""k of hubness and of CSLS, or a tenth of the candidates if these are fewer than 100."""
HISTOGRAM_BINS = 30
GROUPS = 10
"""Groups of queries by norm, of at least so many queries each."""
SCORES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Curve:
    """Numbers that belong together in a chart; a histogram has one more x than y, its edges."""

    data: str
    direction: str
    kind: Literal["norms", "norms by relevance", "right by norm"]
    name: str
    """Of the side that is counted, or asks."""
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a data set."""

    vectors: Float[Tensor, "m d"]
    """All of them, or evenly spaced ones of more than fit into memory."""
    norms: Float[Tensor, " n"] | None = None
    """Of all of them; None: those of the vectors."""
    texts: TextFacts | None = None
    """What was encoded, where it was text that is known."""


def measure_sides(
    sides: Mapping[str, Side],
    place: tuple[str, str],
    pairs: tuple[Tensor, Tensor] | None,
    table: Table,
) -> list[Curve]:
    """Add the norms and the shape of the sides of a data set, under its first direction.

    `pairs` are the raw vectors of what belongs together. Returned are the norms' histograms.
    """
    curves = []
    for name, side in sides.items():
        x = side.vectors.double()
        norms = x.norm(dim=1) if side.norms is None else side.norms
        check_lengths(name, norms)
        shape = geometry.isotropy(x) | geometry.anisotropy(x)
        measured = {
            f"norm_{name}_{k}": v for k, v in geometry.norm_statistics(norms[:, None]).items()
        }
        measured |= {f"{name}_{key}": value for key, value in shape.items()}
        for metric, value in measured.items():
            table.add(*place, "", metric, Estimate(value.item(), n=len(norms)))
        if side.texts is not None:
            measure_texts(place, name, norms, side.texts, table)
        curves.append(Curve(*place, "norms", name, *histogram(norms)))
    if len(sides) < 2 or pairs is None:
        return curves
    measured = geometry.modality_gap(*(side.vectors.double() for side in sides.values()))
    measured["log_norm_cosine_correlation"] = geometry.log_norm_cosine_correlation(*pairs)
    for metric, value in measured.items():
        table.add(*place, "", metric, Estimate(value.item()))
    return curves


def histogram(norms: Float[Tensor, " n"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The edges of equal bins and how many norms each holds."""
    low, high = norms.min().item(), norms.max().item()
    if high - low <= 1e-6 * high:
        margin = 0.01 * high or 1.0
        low, high = low - margin, high + margin
    edges = torch.linspace(low, high, HISTOGRAM_BINS + 1, dtype=torch.float64)
    return tuple(edges.tolist()), tuple(torch.histc(norms, HISTOGRAM_BINS, low, high).tolist())


def measure_hubness(
    search: Search, outcomes: Mapping[str, Outcomes], how: How, table: Table
) -> dict[str, Int[Tensor, " q"]]:
    """Add how unevenly candidates are chosen, by cell; return each query's best candidate."""
    words, k = search.direction, neighbours(search.count)
    answers, by_cosine = {}, outcomes["cosine"].best.documents[:, :k]
    for cells in how.groups(words):
        nearest = outcomes[cells[0]].best.documents[:, :k]
        kept = clustered_mean(kept_share(by_cosine, nearest), search.example, *how.drawn)
        occurrence = torch.bincount(nearest.flatten(), minlength=search.count)
        found = geometry.occurrence_statistics(occurrence, search.norms)
        for cell in cells:
            answers[cell] = nearest[:, 0]
            _add_hubness(table, search, cell, found)
            table.add(*words.place, cell, "nearest_kept", kept)
    spread = (search.norms.std(correction=0) / search.norms.mean()).item()
    table.add(*words.place, "", "candidate_norm_cv", Estimate(spread, n=search.count))
    some = search.thinned
    leverage = norm_leverage(search.queries, some.candidates(0.0))
    table.add(*words.place, "", "norm_leverage", Estimate(leverage, n=some.count))
    table.add(*words.place, "", "queries", Estimate(len(search.queries)))
    table.add(*words.place, "", "candidates", Estimate(search.count))
    table.add(*words.place, "", "candidates_compared", Estimate(some.count))
    table.add(*words.place, "", "hubness_neighbours", Estimate(k))
    return answers


def _add_hubness(
    table: Table, search: Search, scored_with: str, found: Mapping[str, Tensor], end: str = ""
) -> None:
    words = search.direction
    for name, value in found.items():
        metric = f"hubness_{name}{end}"
        table.add(*words.place, scored_with, metric, Estimate(value.item()))


def kept_share(before: Int[Tensor, "q k"], after: Int[Tensor, "q k"]) -> Float[Tensor, " q"]:
    """The share of a query's nearest that are still among them, wherever they stand."""
    return (before[:, :, None] == after[:, None, :]).any(2).double().mean(1)


def neighbours(items: int) -> int:
    """How many nearest candidates count for hubness."""
    return min(NEIGHBOURS, max(1, items // 10))


def measure_confidence(
    search: Search, own: Outcomes, answers: Int[Tensor, " q"], how: How, table: Table
) -> Curve:
    """Add whether the norms of queries, and of what they chose, say which answers are right.

    Returned is the share of right answers in groups of queries, from short to long ones.
    """
    hit, norms = own.values[search.direction.hit], search.queries.norm(dim=1)
    chosen = search.norms[answers]
    return add_confidence(search.direction, hit, norms, chosen, search.example, how, table)


def add_confidence(
    words: Direction,
    hit: Float[Tensor, " q"],
    norms: Float[Tensor, " q"],
    chosen: Float[Tensor, " q"],
    example: Int[Tensor, " q"],
    how: How,
    table: Table,
) -> Curve:
    """The same from what each query got, its norm, and the norm of what it chose."""
    decided = (hit == 0) | (hit == 1)
    right = hit[decided] == 1
    counts = {"right": right, "wrong": ~right, "undecided": ~decided}
    for name, which in counts.items():
        table.add(*words.place, how.own, f"answers_{name}", Estimate(int(which.sum())))
    for name, values in (("query_norm", norms), ("answer_norm", chosen)):
        told = separation(values[decided], right, example[decided], how)
        for kind, estimate in told.items():
            table.add(*words.place, how.own, f"{name}_{kind}", estimate)
    groups = norms.argsort().tensor_split(min(GROUPS, max(1, len(hit) // GROUPS)))
    return Curve(
        words.data,
        words.title,
        "right by norm",
        words.query,
        tuple(norms[group].mean().item() for group in groups),
        tuple(hit[group].mean().item() for group in groups),
    )


def separation(
    values: Float[Tensor, " q"], right: Bool[Tensor, " q"], example: Int[Tensor, " q"], how: How
) -> dict[str, Estimate]:
    """AUROC and Cohen's d of right against wrong answers; empty if there is nothing to compare."""
    values, rights = values.double(), int(right.sum())
    if len(values) < 3 or rights in (0, len(values)):
        return {}
    if values.max() - values.min() <= 1e-6 * values.abs().max():
        return {}
    group = values.unique(return_inverse=True)[1]
    drawn = [
        _weighted_separation(values, group, right, weight.double())
        for weight in example_weights(example, how)
    ]
    areas, ds = torch.tensor(drawn, dtype=torch.float64).T
    rarer = min(rights, len(values) - rights)
    effect = geometry.cohens_d(values[right], values[~right]).item()
    return {
        # An area is a share of pairs, and there are no more independent ones than rarer answers.
        "auroc": share(auroc(values, right), areas, rarer, LEVEL),
        "cohens_d": Estimate(effect, *percentiles(ds, LEVEL), len(values)),
    }


def example_weights(example: Int[Tensor, " q"], how: How) -> Iterator[Int[Tensor, " q"]]:
    """How often each query counts when its examples are drawn with replacement."""
    names, row = example.unique(return_inverse=True)
    for tile in draws(len(names), how.resamples, how.seed):
        for drawn in tile:
            yield torch.bincount(drawn, minlength=len(names))[row]


def _weighted_separation(
    values: Tensor, group: Tensor, right: Tensor, weight: Tensor
) -> tuple[float, float]:
    """AUROC and Cohen's d where each value counts `weight` times; `group` is its rank."""
    rights = torch.bincount(group, weight * right)
    wrongs = torch.bincount(group, weight * ~right, minlength=len(rights))
    below = wrongs.cumsum(0) - wrongs / 2
    pairs = rights.sum() * wrongs.sum()
    means = [(weight * side * values).sum() / (weight * side).sum() for side in (right, ~right)]
    deviation = values - torch.where(right, means[0], means[1])
    spread = ((weight * deviation.square()).sum() / (weight.sum() - 2)).sqrt()
    return ((rights * below).sum() / pairs).item(), ((means[0] - means[1]) / spread).item()


def check_enough(search: Search) -> None:
    """Refuse what is too small for any part of an audit."""
    words, examples = search.direction, int(search.example.max()) + 1
    if examples < LEAST_EXAMPLES:
        raise ValueError(
            f"{words.data} has {examples} {words.examples}: at least {LEAST_EXAMPLES} are needed, "
            "to fit similarities on one half and judge them on the other."
        )
    width = search.queries.shape[1]
    if min(search.count, width) < 2:
        raise ValueError(
            f"{words.data} has {search.count} {words.candidates} vectors of width {width}: at "
            "least 2 of width 2 are needed."
        )


def measure_remedies(
    search: Search, how: How, table: Table, names: Sequence[str] = ()
) -> list[Problem]:
    """Add post-hoc similarities, fitted on one half of the examples and judged on the other.

    `names` are those of `offsphere.evaluation.similarity`; without any, a usual choice. Returned
    are those that could not be fitted.
    """
    check_enough(search)
    words, examples = search.direction, int(search.example.max()) + 1
    fitted_on = reference_half(examples, how.seed)
    reference, judged = search.among(fitted_on), search.among(~fitted_on)
    items, queries = reference.candidates(0.0), reference.queries
    similarities = remedies(names, neighbours(min(len(queries), len(items))))
    contrasts = sum(not ranks_as_cosine(each) for each in similarities.values())
    level = 1 - (1 - LEVEL) / max(1, contrasts)
    place = words.place
    facts = {"fitted_on": int(fitted_on.sum()), "judged_on": int((~fitted_on).sum())}
    for name, value in {**facts, "remedies_level": level}.items():
        table.add(*place, "", name, Estimate(value))
    cosine = judge(CellSimilarity(), judged)
    _add_judged(table, judged, "cosine", cosine, how)
    problems = []
    for name, similarity in similarities.items():
        try:
            answers = judge(similarity.fit(items, queries), judged)
        except ValueError as error:
            problems.append(Problem(*place, name, str(error)))
            continue
        _add_judged(table, judged, name, answers, how)
        if not ranks_as_cosine(similarity):
            surplus = answers.worth - cosine.worth
            change = clustered_mean(
                surplus, judged.example, level, how.resamples, how.seed, "change"
            )
            table.add(*place, name, f"{words.metric}_minus_cosine{HALF}", change)
    return problems


def remedies(names: Sequence[str], k: int) -> dict[str, Similarity]:
    """The similarities of these names, or the usual choice, with dot, which asks for no fit, beside
    the others; k is the neighbourhood of CSLS."""
    if names:
        return {n: Csls(k) if n == "csls" else named(n) for n in names if n != "cosine"}
    return {
        "dot": CellSimilarity(CORNERS["dot"]),
        "centred": Centred(),
        "centred, then dot": Centred(exponents=CORNERS["dot"]),
        "top component removed": TopRemoved(),
        "whitened": Whitened(),
        "CSLS": Csls(k),
        "z-scored queries": QueryZScore(),
    }


def ranks_as_cosine(similarity: Similarity) -> bool:
    """Whether each query's ranking is cosine's by construction."""
    if isinstance(similarity, CellSimilarity):
        return similarity.exponents[1] == 1
    return isinstance(similarity, QueryZScore)


def _add_judged(table: Table, search: Search, name: str, answers: Judged, how: How) -> None:
    words, n = search.direction, len(search.example.unique())
    place = (*words.place, name)
    table.add(*place, f"{words.metric}{HALF}", Estimate(answers.worth.mean().item(), n=n))
    decided = (answers.hit == 0) | (answers.hit == 1)
    right = answers.hit[decided] == 1
    told = separation(answers.top_score[decided], right, search.example[decided], how)
    for kind, estimate in told.items():
        table.add(*place, f"top_score_{kind}{HALF}", estimate)
    _add_hubness(table, search, name, answers.hubness, HALF)


def reference_half(examples: int, seed: int) -> Bool[Tensor, " e"]:
    """The examples on which remedies are fitted: the first half of a permutation by the seed."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    half = torch.zeros(examples, dtype=torch.bool)
    half[order[: examples // 2]] = True
    return half


class Judged(NamedTuple):
    """What a similarity answers to each query."""

    hit: Float[Tensor, " q"]
    """Whether the best candidate is right; of several equally good ones the share that is."""
    worth: Float[Tensor, " q"]
    """By the metric that decides: nDCG@10 of graded answers, the hit of others."""
    top_score: Float[Tensor, " q"]
    hubness: dict[str, Tensor]


def judge(similarity: Similarity, search: Search) -> Judged:
    """The best candidate of each query, a tile of queries at a time, compared in float32."""
    items = search.candidates(0.0)
    k = neighbours(len(items))
    occurrence = torch.zeros(len(items), dtype=torch.long)
    hits, worths, best = [], [], []
    order = search.pair_query.argsort()
    pair_query, pair_item = search.pair_query[order], search.pair_item[order]
    rows = torch.arange(len(search.queries))
    for tile in rows.split(max(1, SCORES_AT_ONCE // len(items))):
        scores = similarity.scores(search.queries[tile], items).float()
        first, last = torch.searchsorted(pair_query, torch.stack([tile[0], tile[-1] + 1])).tolist()
        is_right = torch.zeros_like(scores, dtype=torch.bool)
        is_right[pair_query[first:last] - tile[0], pair_item[first:last]] = True
        top = scores.max(1, keepdim=True).values
        is_top = scores == top
        hits.append((is_top & is_right).sum(1).double() / is_top.sum(1))
        best.append(top[:, 0])
        first = scores.topk(min(max(k, PLACES), len(items))).indices
        graded = search.direction.graded
        worths.append(worth(search, first[:, :PLACES], tile) if graded else hits[-1])
        occurrence += torch.bincount(first[:, :k].flatten(), minlength=len(occurrence))
    statistics = geometry.occurrence_statistics(occurrence, items.norm(dim=1))
    return Judged(torch.cat(hits), torch.cat(worths), torch.cat(best), statistics)
