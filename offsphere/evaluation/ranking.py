"""Ranked retrieval: the best documents of each query under a cell, and what they are worth.

The metrics are trec_eval's, through the package pytrec-eval-terrier: ties are broken by document
number, read as text, the larger one first. nDCG has linear gains: grade / log2(1 + rank).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.evaluation.geometry import top_items
from offsphere.evaluation.similarity import Similarity

if TYPE_CHECKING:
    from jaxtyping import Float, Int

DEPTH = 100
"""Documents that are kept per query."""
SCORES_AT_ONCE = 2**24

Relevant = Mapping[int, int]
"""The grades (above 0) of one query's relevant documents, by their numbers."""


class Ranking(NamedTuple):
    """The best documents of each query, best first."""

    scores: Float[Tensor, "q k"]
    documents: Int[Tensor, "q k"]


class Outcomes(NamedTuple):
    """What each query's ranking is worth."""

    ndcg10: Float[Tensor, " q"]
    recall100: Float[Tensor, " q"]
    mrr10: Float[Tensor, " q"]

    def means(self) -> dict[str, float]:
        """The mean of each over the queries."""
        return {name: values.mean().item() for name, values in self._asdict().items()}


def rank(
    queries: Float[Tensor, "q d"],
    documents: Float[Tensor, "n d"],
    document_exponent: float,
) -> Ranking:
    """The documents of largest q . d / |d|**g: only the document's exponent g can change a ranking.

    A query's own exponent scales all its scores alike (Prop. 4.1 and T.2 of 2602.09229).
    """
    found = top_items(
        queries, shrink(documents.detach(), float(document_exponent)), min(DEPTH, len(documents))
    )
    return Ranking(*found)


def rank_by(
    similarity: Similarity,
    queries: Float[Tensor, "q d"],
    documents: Float[Tensor, "n d"],
) -> Ranking:
    """The documents of largest score under a fitted similarity, some queries at a time."""
    tiles = queries.split(max(1, SCORES_AT_ONCE // len(documents)))
    best = [similarity.scores(x, documents).topk(min(DEPTH, len(documents))) for x in tiles]
    return Ranking(torch.cat([x.values for x in best]), torch.cat([x.indices for x in best]))


def outcomes(ranking: Ranking, relevant: Sequence[Relevant]) -> Outcomes:
    """nDCG@10, Recall@100 and MRR@10 of each query, by trec_eval."""
    if len(relevant) != len(ranking.documents):
        raise ValueError(
            f"Expected the relevant documents of each of {len(ranking.documents)} queries, got "
            f"{len(relevant)}."
        )
    without = [number for number, grades in enumerate(relevant) if not grades]
    if without:
        raise ValueError(
            f"{len(without)} queries have no relevant document (first: query {without[0]}): leave "
            "them out, their metrics are undefined."
        )
    truth = {str(q): {str(d): int(g) for d, g in r.items()} for q, r in enumerate(relevant)}
    deep = _trec_eval(truth, _as_run(ranking, DEPTH), {"ndcg_cut.10", "recall.100"})
    # trec_eval's reciprocal rank has no cutoff: the run has.
    short = _trec_eval(truth, _as_run(ranking, 10), {"recip_rank"})
    names = [str(q) for q in range(len(relevant))]
    columns = [(deep, "ndcg_cut_10"), (deep, "recall_100"), (short, "recip_rank")]
    values = [[found[q][measure] for q in names] for found, measure in columns]
    return Outcomes(*torch.tensor(values, dtype=torch.float64))


def above_floor(trained: Float[Tensor, " q"], untrained: Float[Tensor, " q"]) -> bool:
    """Is the mean gain over the untrained model more than two standard errors over queries?"""
    gain = trained.double() - untrained.double()
    if len(gain) < 2:
        return False
    error = gain.std(correction=1).item() / math.sqrt(len(gain))
    return gain.mean().item() > 2 * error


def _as_run(ranking: Ranking, depth: int) -> dict[str, dict[str, float]]:
    documents, scores = ranking.documents[:, :depth].tolist(), ranking.scores[:, :depth].tolist()
    return {
        str(query): {str(d): s for d, s in zip(*row, strict=True)}
        for query, row in enumerate(zip(documents, scores, strict=True))
    }


def _trec_eval(truth, run, measures: set[str]) -> dict[str, dict[str, float]]:
    try:
        import pytrec_eval
    except ImportError:
        raise ValueError(
            "Retrieval metrics need the package pytrec-eval-terrier, a dependency that is not "
            "installed: pip install pytrec-eval-terrier."
        ) from None
    return pytrec_eval.RelevanceEvaluator(truth, measures).evaluate(run)
