"""Sentence encoders as their files describe them: raw vectors, pooling, prompts and length.

A transformer with a pooling needs transformers alone; models with further modules (a dense layer, a
layer-norm) are run by sentence-transformers itself, up to the Normalize at their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from offsphere.encoders.text import (
    PLAIN,
    HuggingFaceEncoder,
    cached_features,
    hugging_face_encoder,
    model_folder,
    read_json,
    sentence_modules,
)
from offsphere.encoders.weights import why

if TYPE_CHECKING:
    from jaxtyping import Float, Int

USUAL, MOST = 512, 8192
"""Tokens after which a text is cut if the model's files do not say, and at most."""


class ModuleStack(nn.Module):
    """The modules of a sentence-transformers model without the Normalize at its end."""

    def __init__(self, modules: Sequence[nn.Module], tokenizer: Any) -> None:
        super().__init__()
        self.parts, self.tokenizer = nn.ModuleList(modules), tokenizer
        self.padding: int = tokenizer.pad_token_id
        self.pooling = "modules"

    def tokenize(self, texts: Sequence[str], max_length: int) -> Int[Tensor, "n t"]:
        """Token numbers, cut at `max_length` and padded to the longest text."""
        tokens = self.tokenizer(
            list(texts), truncation=True, max_length=max_length, padding=True, return_tensors="pt"
        )
        return tokens["input_ids"]

    def forward(self, tokens: Int[Tensor, "n t"]) -> Float[Tensor, "n d"]:
        features = {"input_ids": tokens, "attention_mask": (tokens != self.padding).long()}
        for part in self.parts:
            features = part(features)
        return features["sentence_embedding"]


class SentenceModel(NamedTuple):
    """An encoder with what belongs to it."""

    encoder: HuggingFaceEncoder | ModuleStack
    prompts: dict[str, str]
    """What is put before a text, by its side: query, document."""
    max_length: int
    trained_with: str
    """cosine if the model ends in a Normalize, else unknown."""
    device: torch.device

    @property
    def padding(self) -> int:
        return self.encoder.padding

    def tokenize(self, texts: Sequence[str]) -> Int[Tensor, "n t"]:
        """Token numbers of texts as they are, cut and padded."""
        return self.encoder.tokenize(texts, self.max_length)

    def encode(self, texts: Sequence[str]) -> Float[Tensor, "n d"]:
        """Raw vectors, kept in the user's cache."""
        return cached_features(self.encoder, self.tokenize(texts), self.device)  # pyright: ignore


def sentence_model(name: str, pooling: str, device: torch.device) -> SentenceModel:
    """The model of a local folder or a hub name, with its own prompts and length."""
    folder = model_folder(name)
    kinds = sentence_modules(folder)
    if kinds in PLAIN or find_spec("sentence_transformers") is None:
        encoder = hugging_face_encoder(name, pooling)
    else:
        encoder = _stack(folder, kinds)
    trained_with = "cosine" if kinds[-1] == "Normalize" else "unknown"
    return SentenceModel(
        encoder, _prompts(folder), _length(folder, encoder.tokenizer), trained_with, device
    )


def _stack(folder: Path, kinds: Sequence[str]) -> ModuleStack:
    from sentence_transformers import SentenceTransformer

    if kinds[0] != "Transformer":
        raise ValueError(
            f"{folder} begins with the module {kinds[0]}: expected a Transformer. Encode with it "
            "yourself and audit the vectors (--vectors)."
        )
    try:
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    except Exception as error:  # on foreign files it raises anything
        raise OSError(f"sentence-transformers cannot load {folder} ({why(error)}).") from error
    modules = list(model.children())
    kept = modules[:-1] if kinds[-1] == "Normalize" else modules
    return ModuleStack(kept, model.tokenizer)


def _prompts(folder: Path) -> dict[str, str]:
    """The prompts that the model's files have for queries and documents."""
    file = folder / "config_sentence_transformers.json"
    found = read_json(file, dict).get("prompts") if file.exists() else None
    if not isinstance(found, dict):
        return {}
    names = {"query": ("query",), "document": ("document", "passage", "corpus")}
    said = {
        side: [found[x] for x in alike if isinstance(found.get(x), str) and found[x]]
        for side, alike in names.items()
    }
    return {side: texts[0] for side, texts in said.items() if texts}


def _length(folder: Path, tokenizer: Any) -> int:
    """Tokens after which the model's files, or its tokenizer, cut a text."""
    file = folder / "sentence_bert_config.json"
    found = read_json(file, dict).get("max_seq_length") if file.exists() else None
    for length in (found, tokenizer.model_max_length):
        if isinstance(length, int) and 0 < length <= MOST:  # some tokenizers say 1e30
            return length
    return USUAL
