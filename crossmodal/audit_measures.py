"""What an audit measures: what norms say, what their use changes, what post-hoc remedies change.

Intervals are percentile bootstraps over images, captions going with their image, and closed
formulas where too few answers differ, as in the benchmark. Answers whose right candidate ties with
a wrong one are neither right nor wrong: they are left out of the comparison of right and wrong
answers, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from crossmodal.benchmark import DIRECTIONS, LEVEL, Benchmarked, Direction, Scores
from crossmodal.features import Features
from offsphere.cells import shrink
from offsphere.evaluation import geometry
from offsphere.evaluation.confidence import auroc
from offsphere.evaluation.intervals import change_interval, percentiles, share_interval
from offsphere.evaluation.retrieval import draws, same_ranking
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
from offsphere.evaluation.zero_shot import class_vectors
from offsphere.names import CORNERS
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

NEIGHBOURS = 10
"""k of hubness and of CSLS, or a tenth of the candidates if these are fewer than 100."""

HISTOGRAM_BINS = 30
GROUPS = 10
"""Groups of queries by norm, of at least so many queries each."""

SCORES_AT_ONCE = 2**24
LEAST_IMAGES = 4
"""Two for either half: nothing can be fitted on one."""


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Separation:
    """How well a number tells right answers from wrong ones."""

    auroc: Estimate
    """Chance that it is larger for a right answer than for a wrong one."""
    cohens_d: Estimate
    """Right minus wrong, in pooled standard deviations."""


@dataclass(frozen=True)
class Confidence:
    """What norms say about the answers of one direction, scored with the own cell."""

    right: int
    wrong: int
    undecided: int
    query_norm: Separation | None
    """None if all answers are right or all are wrong, or all norms are the same."""
    answer_norm: Separation | None
    """The same of the norm of the candidate that was chosen."""
    mean_norm: tuple[float, ...]
    """Of the queries in up to ten equally large groups, from the shortest to the longest."""
    share_right: tuple[float, ...]
    """Of the answers in each group."""


@dataclass(frozen=True)
class Scored:
    """Cells that tie by construction, because they agree on the candidates' exponent."""

    cells: tuple[str, ...]
    exponent: float
    metrics: dict[str, Estimate]
    minus_cosine: dict[str, Estimate]
    """On the same examples."""
    hubness: dict[str, float]


@dataclass(frozen=True)
class Remedy:
    """A similarity fitted on the reference half and judged on the other."""

    name: str
    recall: float = float("nan")
    """At 1; of classes the accuracy."""
    minus_cosine: Estimate | None = None
    """None for cosine itself and for what ranks alike by construction."""
    top_score: Separation | None = None
    """How well the best score of a query says whether the answer is right."""
    hubness: dict[str, float] | None = None
    problem: str | None = None
    """Why it could not be fitted."""


@dataclass(frozen=True)
class Remedies:
    reference: int
    """Images on which they were fitted."""
    judged: int
    """Images on which they are judged, none of them among the reference."""
    level: float
    """Of the intervals of differences: Bonferroni's over the remedies that can change a ranking."""
    rows: tuple[Remedy, ...]
    """The first is cosine."""


@dataclass(frozen=True)
class DirectionAudit:
    """One side asks, the other answers."""

    title: str
    query: str
    candidates: str
    metric: str
    """Recall at 1, or accuracy."""
    images: int
    queries: int
    chance: dict[str, float]
    candidate_cv: float
    """Std / mean of the candidates' norms: without spread there is nothing to use."""
    neighbours: int
    """k of the hubness."""
    scored: tuple[Scored, ...]
    confidence: Confidence
    remedies: Remedies

    def with_exponent(self, exponent: float) -> Scored:
        """The cells with this exponent on the candidates' side."""
        return next(group for group in self.scored if group.exponent == exponent)


@dataclass(frozen=True)
class Side:
    """The embeddings of one modality."""

    norms: dict[str, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    """Histogram of the norms."""
    shape: dict[str, float]
    """Isotropy and anisotropy."""


@dataclass(frozen=True)
class DataAudit:
    data: str
    task: str
    images: int
    texts: int
    skipped: int
    sides: dict[str, Side]
    gap: dict[str, float]
    log_norm_cosine_correlation: float
    """Over positive pairs: of an image and its captions, or of an image and its class."""
    directions: tuple[DirectionAudit, ...]


class Search(NamedTuple):
    """The raw embeddings of one direction; a candidate is right if it has the query's key."""

    queries: Float[Tensor, "q d"]
    items: Float[Tensor, "n d"]
    query_key: Int[Tensor, " q"]
    item_key: Int[Tensor, " n"]
    query_image: Int[Tensor, " q"]
    """The image a query belongs to: bootstrap and halves go by images."""
    item_image: Int[Tensor, " n"] | None
    """None for classes, which belong to no image."""

    def among(self, images: Bool[Tensor, " i"]) -> Search:
        """Only the queries and candidates of some images; classes stay."""
        asked = images[self.query_image]
        search = self._replace(
            queries=self.queries[asked],
            query_key=self.query_key[asked],
            query_image=self.query_image[asked],
        )
        if self.item_image is None:
            return search
        kept = images[self.item_image]
        return search._replace(
            items=self.items[kept], item_key=self.item_key[kept], item_image=self.item_image[kept]
        )


class Judged(NamedTuple):
    """What a similarity answers to each query."""

    hit: Float[Tensor, " q"]
    """Whether the best candidate is right; of several equally good ones the share that is."""
    top_score: Float[Tensor, " q"]
    hubness: dict[str, float]


def in_float64(found: Scores) -> Features:
    """The features of a data set, which must have enough images for two halves."""
    images, texts, owner, labels = found.features
    if len(images) < LEAST_IMAGES:
        raise ValueError(
            f"{found.data} has {len(images)} images: at least {LEAST_IMAGES} are needed, to fit "
            "similarities on one half and judge them on the other."
        )
    return Features(images.double(), texts.double(), owner, labels)


def audit(
    what: Benchmarked,
    found: Scores,
    resamples: int,
    seed: int,
    similarities: Sequence[str] = (),
) -> DataAudit:
    """Everything about one data set, from the features and outcomes of its benchmark."""
    features, ways = in_float64(found), DIRECTIONS[found.task]
    return DataAudit(
        data=found.data,
        task=found.task,
        images=len(features.images),
        texts=len(features.texts),
        skipped=found.skipped,
        sides={"image": _side(features.images), "text": _side(features.texts)},
        gap=_plain(geometry.modality_gap(features.images, features.texts)),
        log_norm_cosine_correlation=_log_norm_cosine_correlation(features),
        directions=tuple(
            audit_direction(what, found, features, direction, resamples, seed, similarities)
            for direction in track(ways, len(ways), f"auditing {found.data}", "directions")
        ),
    )


def audit_direction(
    what: Benchmarked,
    found: Scores,
    features: Features,
    direction: Direction,
    resamples: int,
    seed: int,
    similarities: Sequence[str] = (),
) -> DirectionAudit:
    """What magnitude does when the one side asks the other."""
    search = search_of(features, direction)
    metric = next(iter(direction.metrics))
    k = neighbours(len(search.items))
    item_norms = search.items.norm(dim=1)
    scored, answers = [], {}
    for cells in same_ranking(what.cells, direction.candidates):
        exponent = candidate_exponent(what, cells[0], direction)
        items = candidates(features, direction, exponent)
        nearest = geometry.top_items(geometry.unit(search.queries), items, k)[1]
        answers |= dict.fromkeys(cells, nearest[:, 0])
        occurrence = torch.bincount(nearest.flatten(), minlength=len(items))
        measured = [name for name in direction.metrics if name in found.metrics[cells[0]]]
        scored.append(
            Scored(
                cells=cells,
                exponent=exponent,
                metrics={
                    name: Estimate(found.metrics[cells[0]][name], *found.intervals[cells[0]][name])
                    for name in measured
                },
                minus_cosine={
                    name: Estimate(*found.against_cosine[cells[0]][name]) for name in measured
                },
                hubness=_plain(geometry.occurrence_statistics(occurrence, item_norms)),
            )
        )
    outcomes = found.outcomes[what.own]
    hit = outcomes["correct" if metric == "top1" else metric.replace("_r", "_hit")]
    return DirectionAudit(
        title=direction.title,
        query=direction.query,
        candidates=direction.title.rpartition(" ")[2],
        metric=metric,
        images=len(features.images),
        queries=len(search.queries),
        chance={name: found.metrics[what.own][f"chance_{name}"] for name in scored[0].metrics},
        candidate_cv=geometry.norm_statistics(search.items)["cv"].item(),
        neighbours=k,
        scored=tuple(scored),
        confidence=confidence(search, hit, item_norms[answers[what.own]], resamples, seed),
        remedies=remedies(search, len(features.images), resamples, seed, similarities),
    )


def search_of(features: Features, direction: Direction) -> Search:
    """Queries and raw candidates of a direction, and which belong together."""
    images, texts, owner, labels = features
    rows = torch.arange(len(images))
    items = candidates(features, direction, 0.0)
    if labels is not None:
        return Search(images, items, labels.long(), torch.arange(len(items)), rows, None)
    if direction.candidates == "right":
        return Search(images, items, rows, owner.long(), rows, owner.long())
    return Search(texts, items, owner.long(), rows, owner.long(), rows)


def candidates(features: Features, direction: Direction, exponent: float) -> Float[Tensor, "n d"]:
    """The candidates' side of a direction, shrunk: captions, images or class vectors."""
    images, texts, owner, labels = features
    if labels is not None:
        return class_vectors(texts, owner, int(owner.max()) + 1, exponent)
    return shrink(texts if direction.candidates == "right" else images, exponent)


def candidate_exponent(what: Benchmarked, cell: str, direction: Direction) -> float:
    """A cell's exponent on the side that answers, the only one that can change a ranking."""
    return float(what.cells[cell][("left", "right").index(direction.candidates)])


def neighbours(items: int) -> int:
    """How many nearest candidates count for hubness."""
    return min(NEIGHBOURS, max(1, items // 10))


def confidence(
    search: Search,
    hit: Float[Tensor, " q"],
    answer_norms: Float[Tensor, " q"],
    resamples: int,
    seed: int,
) -> Confidence:
    """Do the norms of queries, and of the candidates they chose, say which answers are right?"""
    decided = (hit == 0) | (hit == 1)
    right = hit[decided] == 1
    query_norms, image = search.queries.norm(dim=1), search.query_image[decided]
    groups = query_norms.argsort().tensor_split(min(GROUPS, max(1, len(hit) // GROUPS)))
    return Confidence(
        right=int(right.sum()),
        wrong=int((~right).sum()),
        undecided=int((~decided).sum()),
        query_norm=separation(query_norms[decided], right, image, resamples, seed),
        answer_norm=separation(answer_norms[decided], right, image, resamples, seed),
        mean_norm=tuple(query_norms[group].mean().item() for group in groups),
        share_right=tuple(hit[group].mean().item() for group in groups),
    )


def separation(
    values: Float[Tensor, " q"],
    right: Bool[Tensor, " q"],
    image: Int[Tensor, " q"],
    resamples: int,
    seed: int,
) -> Separation | None:
    """AUROC and Cohen's d of right against wrong answers; None if there is nothing to compare."""
    values, rights = values.double(), int(right.sum())
    if len(values) < 3 or rights in (0, len(values)):
        return None
    if values.max() - values.min() <= 1e-6 * values.abs().max():
        return None
    group = values.unique(return_inverse=True)[1]
    drawn = [
        _weighted_separation(values, group, right, weight.double())
        for weight in image_weights(image, resamples, seed)
    ]
    aurocs, ds = torch.tensor(drawn, dtype=torch.float64).T
    area, rarer = auroc(values, right), min(rights, len(values) - rights)
    effect = geometry.cohens_d(values[right], values[~right]).item()
    return Separation(
        # An area is a share of pairs, and there are no more independent ones than rarer answers.
        Estimate(area, *share_interval(area, aurocs, rarer, LEVEL)),
        Estimate(effect, *percentiles(ds, LEVEL)),
    )


def image_weights(
    image: Int[Tensor, " q"], resamples: int, seed: int
) -> Iterator[Int[Tensor, " q"]]:
    """How often each query counts when its images are drawn with replacement."""
    names, row = image.unique(return_inverse=True)
    for tile in draws(len(names), resamples, seed):
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


def remedies(
    search: Search, images: int, resamples: int, seed: int, names: Sequence[str] = ()
) -> Remedies:
    """Post-hoc similarities, fitted on one half of the images and judged on the other.

    `names` are those of `offsphere.evaluation.similarity`; without any, a usual choice.
    """
    reference_images = reference_half(images, seed)
    reference, judged = search.among(reference_images), search.among(~reference_images)
    local = Csls(neighbours(min(len(reference.queries), len(reference.items))))
    similarities = {
        "centred": Centred(),
        "centred, then dot": Centred(CORNERS["dot"]),
        "top component removed": TopRemoved(),
        "whitened": Whitened(),
        "CSLS": local,
        "z-scored queries": QueryZScore(),
    }
    if names:
        similarities = {n: local if n == "csls" else named(n) for n in names if n != "cosine"}
    contrasts = sum(not ranks_as_cosine(each) for each in similarities.values())
    level = 1 - (1 - LEVEL) / max(1, contrasts)
    cosine = judge(CellSimilarity(), judged)
    rows = [_remedy("cosine", cosine, judged, None, resamples, seed)]
    for name, similarity in similarities.items():
        try:
            answers = judge(similarity.fit(reference.items, reference.queries), judged)
        except ValueError as error:
            rows.append(Remedy(name, problem=str(error)))
            continue
        difference = None
        if not ranks_as_cosine(similarity):
            surplus = answers.hit - cosine.hit
            image = judged.query_image
            difference = clustered_mean(surplus, image, level, resamples, seed, "change")
        rows.append(_remedy(name, answers, judged, difference, resamples, seed))
    return Remedies(
        reference=int(reference_images.sum()),
        judged=int((~reference_images).sum()),
        level=level,
        rows=tuple(rows),
    )


def ranks_as_cosine(similarity: Similarity) -> bool:
    """Whether each query's ranking is cosine's by construction."""
    if isinstance(similarity, CellSimilarity):
        return similarity.exponents[1] == 1
    return isinstance(similarity, QueryZScore)


def _remedy(
    name: str,
    answers: Judged,
    search: Search,
    difference: Estimate | None,
    resamples: int,
    seed: int,
) -> Remedy:
    decided = (answers.hit == 0) | (answers.hit == 1)
    told = separation(
        answers.top_score[decided],
        answers.hit[decided] == 1,
        search.query_image[decided],
        resamples,
        seed,
    )
    return Remedy(name, answers.hit.mean().item(), difference, told, answers.hubness)


def reference_half(images: int, seed: int) -> Bool[Tensor, " i"]:
    """The images on which remedies are fitted: the first half of a permutation by the seed."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    half = torch.zeros(images, dtype=torch.bool)
    half[order[: images // 2]] = True
    return half


def judge(similarity: Similarity, search: Search) -> Judged:
    """The best candidate of each query, a tile of queries at a time, compared in float32."""
    k = neighbours(len(search.items))
    occurrence = torch.zeros(len(search.items), dtype=torch.long)
    hits, best = [], []
    rows = torch.arange(len(search.queries))
    for tile in rows.split(max(1, SCORES_AT_ONCE // len(search.items))):
        scores = similarity.scores(search.queries[tile], search.items).float()
        top = scores.max(1, keepdim=True).values
        is_top = scores == top
        is_right = search.query_key[tile][:, None] == search.item_key
        hits.append((is_top & is_right).sum(1).double() / is_top.sum(1))
        best.append(top[:, 0])
        occurrence += torch.bincount(scores.topk(k).indices.flatten(), minlength=len(occurrence))
    statistics = geometry.occurrence_statistics(occurrence, search.items.norm(dim=1))
    return Judged(torch.cat(hits), torch.cat(best), _plain(statistics))


def clustered_mean(
    values: Float[Tensor, " q"],
    cluster: Int[Tensor, " q"],
    level: float,
    resamples: int,
    seed: int,
    kind: Literal["share", "change", "number"] = "number",
) -> Estimate:
    """The mean, and its interval over clusters (images with their captions) drawn again.

    Where too few answers are right, wrong or changed, shares and changes have closed intervals.
    """
    names, row = cluster.unique(return_inverse=True)
    total = torch.bincount(row, values.double(), minlength=len(names))
    count = torch.bincount(row, minlength=len(names)).double()
    drawn = [total[tile].sum(1) / count[tile].sum(1) for tile in draws(len(names), resamples, seed)]
    mean, again, n = values.double().mean().item(), torch.cat(drawn), len(names)
    if kind == "share":
        return Estimate(mean, *share_interval(mean, again, n, level))
    if kind == "change":
        return Estimate(mean, *change_interval(total * (n / len(values)), again, level))
    return Estimate(mean, *percentiles(again, level))


def _side(x: Float[Tensor, "n d"]) -> Side:
    norms = x.norm(dim=1)
    low, high = norms.min().item(), norms.max().item()
    if high - low <= 1e-6 * high:
        margin = 0.01 * high or 1.0
        low, high = low - margin, high + margin
    counts = torch.histc(norms, HISTOGRAM_BINS, low, high)
    shape = geometry.isotropy(x) | geometry.anisotropy(x)
    return Side(
        norms=_plain(geometry.norm_statistics(x)),
        edges=tuple(torch.linspace(low, high, HISTOGRAM_BINS + 1, dtype=torch.float64).tolist()),
        counts=tuple(int(n) for n in counts.tolist()),
        shape=_plain(shape),
    )


def _log_norm_cosine_correlation(features: Features) -> float:
    images, texts, owner, labels = features
    if labels is None:
        pairs = images[owner], texts
    else:
        pairs = images, class_vectors(texts, owner, int(owner.max()) + 1, 0.0)[labels]
    return geometry.log_norm_cosine_correlation(*pairs).item()


def _plain(statistics: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in statistics.items()}
