"""What keeping the documents' norms is worth, collection by collection, and its null.

The published sign that magnitude matters is a correlation over collections: of Cohen's d (are
relevant documents longer?) with the gain of keeping the norm. Here it stands beside the same with
permuted norms (`offsphere.evaluation.relevance`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

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
