"""BM25, the lexical ranking to beat, through the package bm25s."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from offsphere.encoders.store import Store, cache_folder
from offsphere.evaluation.ranking import Ranking


def bm25(queries: Sequence[str], documents: Sequence[str], depth: int) -> Ranking:
    """Each query's best documents by BM25 (k1 1.5, b 0.75, English stop words, no stemming)."""
    bm25s = _library()
    corpus = bm25s.tokenize(list(documents), stopwords="en", show_progress=False)
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index(corpus, show_progress=False)
    asked = bm25s.tokenize(list(queries), stopwords="en", show_progress=False)
    depth = min(depth, len(documents))
    found, scores = index.retrieve(asked, k=depth, show_progress=False)
    return Ranking(torch.from_numpy(scores).double(), torch.from_numpy(found).long())


def cached_bm25(queries: Sequence[str], documents: Sequence[str], depth: int) -> Ranking:
    """The same, kept in the user's cache: every run on a collection has one BM25 beside it."""

    def make() -> dict[str, torch.Tensor]:
        return bm25(queries, documents, depth)._asdict()

    digest = hashlib.blake2b(digest_size=16)
    for texts in (queries, documents):
        for text in texts:
            digest.update(text.encode(errors="surrogatepass") + b"\0")
        digest.update(b"\1")
    facts = ["bm25", _library().__version__, depth, digest.hexdigest()]
    found = Store(cache_folder()).get(facts, make)
    return Ranking(found["scores"], found["documents"])


def _library() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ValueError(
            "BM25 needs the package bm25s, a dependency that is not installed: pip install bm25s."
        ) from None
    return bm25s
