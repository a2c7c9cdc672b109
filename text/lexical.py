"""BM25, the lexical ranking to beat, through the package bm25s."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offsphere.evaluation.ranking import Ranking


def bm25(queries: Sequence[str], documents: Sequence[str], depth: int) -> Ranking:
    """Each query's best documents by BM25 (k1 1.5, b 0.75, English stop words, no stemming)."""
    try:
        import bm25s
    except ImportError:
        raise ValueError(
            "BM25 needs the package bm25s, a dependency that is not installed: pip install bm25s."
        ) from None
    corpus = bm25s.tokenize(list(documents), stopwords="en", show_progress=False)
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index(corpus, show_progress=False)
    asked = bm25s.tokenize(list(queries), stopwords="en", show_progress=False)
    depth = min(depth, len(documents))
    found, scores = index.retrieve(asked, k=depth, show_progress=False)
    return Ranking(torch.from_numpy(scores).double(), torch.from_numpy(found).long())
