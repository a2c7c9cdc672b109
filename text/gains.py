"""What keeping the documents' norms is worth, collection by collection, and its null.

The published sign that magnitude matters is a correlation over collections: of Cohen's d (are
relevant documents longer?) with the gain of keeping the norm. Here it stands beside the same with
each collection's norms permuted among its documents, which keeps their spread and takes away what
they say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.evaluation.geometry import cohens_d, unit
from offsphere.evaluation.ranking import Relevant, outcomes, rank

if TYPE_CHECKING:
    from jaxtyping import Float

FEWEST = 5
"""Collections below which no correlation over them is reported."""
BRIEF = (
    "ndcg10",
    "ndcg10_scored_cosine",
    "ndcg10_scored_dot",
    "ndcg10_permuted",
    "cohens_d",
    "cohens_d_permuted",
    "norm_query_cv",
    "norm_document_cv",
    "norm_leverage",
)
"""What is reported of a collection that is one of many."""


def relevant_norms_d(
    norms: Float[Tensor, " n"], relevant: Sequence[Relevant], idle: Sequence[int]
) -> dict[str, float]:
    """Cohen's d of documents relevant to a measured query against those relevant to none at all.

    Empty where there are no such distractors.
    """
    wanted = sorted({d for grades in relevant for d in grades})
    if len(wanted) < 2 or len(idle) < 2:
        return {}
    return {"cohens_d": cohens_d(norms[wanted], norms[list(idle)]).item()}


def permuted_norms(
    queries: Float[Tensor, "q d"],
    documents: Float[Tensor, "n d"],
    relevant: Sequence[Relevant],
    idle: Sequence[int],
    generator: torch.Generator,
) -> dict[str, float]:
    """nDCG@10 by dot product, and Cohen's d, with the norms permuted among the documents.

    Left out, as Cohen's d is, where there are no distractors to compare with.
    """
    norms = documents.norm(dim=1)[torch.randperm(len(documents), generator=generator)]
    found = relevant_norms_d(norms, relevant, idle)
    if not found:
        return {}
    ranking = rank(queries, unit(documents) * norms[:, None], 0.0)
    return {
        "ndcg10_permuted": outcomes(ranking, relevant).ndcg10.mean().item(),
        "cohens_d_permuted": found["cohens_d"],
    }


def norm_leverage(queries: Float[Tensor, "q d"], documents: Float[Tensor, "n d"]) -> float:
    """How far norms can reorder documents: CV of norms x |mean cosine| / sd of a query's cosines.

    Norms that vary little reorder much where a query's cosines are packed. Both moments of the
    cosines are means over the queries, from d x d sums: no score matrix is made.
    """
    norms = documents.double().norm(dim=1)
    u, v = unit(queries.double()), unit(documents.double())
    means = u @ v.mean(0)
    squares = ((u @ (v.T @ v)) * u).sum(1) / len(v)
    spread = (squares - means.square()).clamp_min(0).sqrt().mean()
    cv = norms.std(correction=0) / norms.mean()
    return (cv * means.mean().abs() / spread).item()


def over_collections(metrics: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Pearson's r, over collections, of Cohen's d with the gain of scoring by dot, not cosine.

    Also the mean gain, and the same r under permuted norms. Empty below five collections.
    """
    rows = []
    for name in names:
        keys = ("cohens_d", "ndcg10_scored_dot", "cohens_d_permuted", "ndcg10_permuted")
        values = [metrics.get(f"test/{name}/{key}", math.nan) for key in keys]
        base = metrics.get(f"test/{name}/ndcg10_scored_cosine", math.nan)
        rows.append([values[0], values[1] - base, values[2], values[3] - base])
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
    table = table[table.isfinite().all(1)]
    if len(table) < FEWEST:
        return {}
    correlation = torch.corrcoef(table.T)
    return {
        "test/norm_gain_mean": table[:, 1].mean().item(),
        "test/norm_gain_r": correlation[0, 1].item(),
        "test/norm_gain_r_permuted": correlation[2, 3].item(),
    }
