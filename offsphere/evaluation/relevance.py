"""What documents' norms say about relevance, and how far they can reorder documents.

The null is the same with the norms permuted among the documents, which keeps their spread and takes
away what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.evaluation.geometry import cohens_d, unit
from offsphere.evaluation.ranking import Relevant, outcomes, rank

if TYPE_CHECKING:
    from jaxtyping import Float


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
