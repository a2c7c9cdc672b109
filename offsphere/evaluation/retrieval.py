"""Image-text retrieval in both directions, scored by a cell, with several captions per image.

The query's own norm multiplies all its scores alike and never changes its ranking, so only the
candidate side's exponent counts: image-to-text depends on the text exponent alone, text-to-image
on the image exponent alone. Queries are therefore always unit vectors here, and cells that tie by
construction give exactly the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.evaluation.checks import checked_side
from offsphere.evaluation.geometry import unit
from offsphere.names import CORNERS

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SCORES_AT_ONCE = 2**24
"""Scores of one tile: whole rows of queries, 128 MB."""

Exponents = tuple[float, float]
"""(image, text) exponents of a cell."""


class Retrieval(NamedTuple):
    metrics: dict[str, float]
    """i2t_r<k> and t2i_r<k>, their chance_..., and mean_r1, the mean of both directions."""
    outcomes: dict[str, Tensor]
    """Per image i2t_hit<k> and i2t_rank, per caption t2i_hit<k> and t2i_rank, on the CPU."""


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


def pair_retrieval(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "m d"],
    owner: Int[Tensor, " m"],
    exponents: Exponents,
    ks: Sequence[int] = (1, 5, 10),
) -> Retrieval:
    """Recall at k from raw embeddings: at least one right candidate among the k best.

    `owner[j]` is the image of caption j. Equal scores count with their expected value under random
    tie-breaking, so that a collapsed model gets chance.
    """
    return scored_with(images, texts, owner, {"": exponents}, ks)[""]


def scored_with(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "m d"],
    owner: Int[Tensor, " m"],
    cells: Mapping[str, Exponents],
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, Retrieval]:
    """`pair_retrieval` for each cell; cells that tie by construction are computed once."""
    images, texts, owner = _checked(images, texts, owner)
    captions = torch.arange(len(texts), device=texts.device)
    to_text = {
        g: _direction(standings(unit(images), shrink(texts, g), owner, captions), "i2t", ks)
        for g in {float(text) for _, text in cells.values()}
    }
    to_image = {
        g: _direction(standings(unit(texts), shrink(images, g), captions, owner), "t2i", ks)
        for g in {float(image) for image, _ in cells.values()}
    }
    chance = _chance(owner.cpu(), len(images), ks)
    found = {}
    for name, (image, text) in cells.items():
        outcomes = to_text[float(text)] | to_image[float(image)]
        metrics = {
            key.replace("hit", "r"): hits.mean().item()
            for key, hits in outcomes.items()
            if "hit" in key
        }
        if 1 in ks:
            metrics["mean_r1"] = (metrics["i2t_r1"] + metrics["t2i_r1"]) / 2
        found[name] = Retrieval(metrics | chance, outcomes)
    return found


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


def _direction(standing: Standing, prefix: str, ks: Sequence[int]) -> dict[str, Tensor]:
    hits = {f"{prefix}_hit{k}": standing.hit(k) for k in ks}
    return {**hits, f"{prefix}_rank": standing.rank()}


def _chance(owner: Int[Tensor, " m"], images: int, ks: Sequence[int]) -> dict[str, float]:
    """Recall of a random ranking."""
    captions = torch.bincount(owner, minlength=images)
    zero, all_texts = torch.zeros_like(captions), torch.full_like(captions, len(owner))
    to_text = Standing(zero, all_texts, captions)
    chance = {f"chance_i2t_r{k}": to_text.hit(k).mean().item() for k in ks}
    return chance | {f"chance_t2i_r{k}": min(k / images, 1.0) for k in ks}


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def _checked(images: Tensor, texts: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides in float64, or an error that says what does not fit."""
    images, texts = checked_side(images, "image"), checked_side(texts, "text")
    if images.shape[1] != texts.shape[1]:
        raise ValueError(
            f"Images have {images.shape[1]} columns and texts {texts.shape[1]}: both must come "
            "from the same model."
        )
    if owner.shape != texts.shape[:1] or owner.is_floating_point():
        raise ValueError(
            f"Expected the number of its image for each of {len(texts)} captions, got "
            f"{owner.dtype} of shape {tuple(owner.shape)}."
        )
    if owner.min() < 0 or owner.max() >= len(images):
        raise ValueError(
            f"The captions' images must be between 0 and {len(images) - 1}, got "
            f"{int(owner.min())} to {int(owner.max())}."
        )
    owner = owner.long().to(images.device)
    without = (torch.bincount(owner, minlength=len(images)) == 0).nonzero().flatten()
    if len(without):
        raise ValueError(
            f"{len(without)} of {len(images)} images have no caption (first: image "
            f"{int(without[0])}): leave them out, nothing can be found for them."
        )
    return images, texts, owner
