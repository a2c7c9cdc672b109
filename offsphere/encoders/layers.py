"""A transformer cut in two: the lower layers are frozen and their outputs kept, the top ones train.

What the lower layers give for a text never changes, so it is computed once and kept in the user's
cache, in float32: training is exactly that of a transformer whose lower layers take no gradient.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from offsphere.encoders.text import (
    CHUNK,
    HuggingFaceEncoder,
    encode_rows,
    mean_pool,
    tokens_hash,
    trimmed,
    weights_hash,
)
from offsphere.run.files import cache_file

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LARGEST_CACHE = 10 * 2**30
"""Bytes of hidden states in the cache; the ones unused for longest make room for new ones."""


class _PassedOn(nn.Module):
    """Stands in for a transformer's embeddings and passes hidden states on unchanged."""

    def forward(self, inputs_embeds: Tensor, **_unused: Any) -> Tensor:
        return inputs_embeds


class TopLayers(nn.Module):
    """The top layers of a transformer and its pooling, on the hidden states below them.

    The last column of its inputs is 1 for a token and 0 for padding, so that a batch is one tensor.
    """

    def __init__(self, backbone: Any, pooling: str) -> None:
        super().__init__()
        self.backbone, self.pooling = backbone, pooling
        self.features_dim: int = backbone.config.hidden_size

    def forward(self, states: Float[Tensor, "n t columns"]) -> Float[Tensor, "n d"]:
        mask, below = states[..., -1] > 0, states[..., :-1]
        found = self.backbone(inputs_embeds=below, attention_mask=mask.long()).last_hidden_state
        return found[:, 0] if self.pooling == "cls" else mean_pool(found, mask)


def cut(encoder: HuggingFaceEncoder, top: int) -> tuple[HuggingFaceEncoder, TopLayers]:
    """The encoder up to its last `top` layers, frozen, and those layers."""
    layers = layers_of(encoder)
    if not 0 < top < len(layers):
        raise ValueError(
            f"--tune=top:{top} must leave a layer to freeze and one to train: the encoder has "
            f"{len(layers)} layers, so at most top:{len(layers) - 1}."
        )
    lower, upper = copy.deepcopy(encoder.backbone), copy.deepcopy(encoder.backbone)
    lower.encoder.layer = lower.encoder.layer[:-top]
    upper.encoder.layer = upper.encoder.layer[-top:]
    upper.embeddings = _PassedOn()
    lower.pooler = upper.pooler = None
    frozen = HuggingFaceEncoder(lower, encoder.tokenizer, encoder.pooling)
    return frozen.requires_grad_(False).eval(), TopLayers(upper, encoder.pooling)


def joined(encoder: HuggingFaceEncoder, upper: TopLayers) -> HuggingFaceEncoder:
    """The encoder with these layers as its last ones; the inverse of `cut`."""
    backbone = copy.deepcopy(encoder.backbone)
    trained = copy.deepcopy(upper.backbone.encoder.layer)
    backbone.encoder.layer = nn.ModuleList([*backbone.encoder.layer[: -len(trained)], *trained])
    return HuggingFaceEncoder(backbone, encoder.tokenizer, encoder.pooling)


def redraw(encoder: HuggingFaceEncoder, count: int, generator: torch.Generator) -> None:
    """Draw the last `count` layers anew, as BERT's start."""
    layers = layers_of(encoder)
    if count > len(layers):
        raise ValueError(f"--redraw={count} is more than the encoder's {len(layers)} layers.")
    spread = encoder.backbone.config.initializer_range
    for module in layers[len(layers) - count :].modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=spread, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


def layers_of(encoder: HuggingFaceEncoder) -> nn.ModuleList:
    """The layers of a BERT-like transformer, first to last."""
    layers = getattr(getattr(encoder.backbone, "encoder", None), "layer", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(encoder.backbone, "embeddings"):
        raise ValueError(
            f"--tune=top and --redraw know BERT's layers, and {type(encoder.backbone).__name__} "
            "has others: use minilm, e5-small or another BERT, or --tune=all."
        )
    return layers


class LowerStates:
    """What the lower layers give for texts: states[rows] is a batch for `TopLayers`."""

    def __init__(self, lengths: Int[Tensor, " n"], of_rows: Callable[[Tensor], Tensor]) -> None:
        """`of_rows` gives the states of these texts' tokens, one text after the other."""
        self.lengths, self.of_rows = lengths, of_rows

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: Int[Tensor, " b"]) -> Float[Tensor, "b t columns"]:
        lengths, flat = self.lengths[rows], self.of_rows(rows)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        padded = flat.new_zeros(*mask.shape, flat.shape[1] + 1)
        padded[mask] = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)
        return padded

    def encode(self, module: nn.Module) -> Float[Tensor, "n d"]:
        """Raw vectors of all texts, shorter ones first so that little padding is computed."""
        order = self.lengths.argsort(stable=True)
        return encode_rows(module, order.split(CHUNK), self.__getitem__)


def lower_states(
    lower: HuggingFaceEncoder, tokens: Int[Tensor, "n t"], device: str = "cpu"
) -> LowerStates:
    """The hidden states of all tokens, from the user's cache or computed once and put there.

    More than the cache may hold is computed when it is asked for, every time.
    """
    lengths = (tokens != lower.padding).sum(1)
    width = lower.features_dim
    folder = cache_file("layers")
    lower = lower.to(device)
    if folder is not None and 4 * width * int(lengths.sum()) <= LARGEST_CACHE:
        facts = json.dumps([weights_hash(lower), tokens_hash(tokens)])
        key = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        file = folder / f"{key}.npy"
        try:
            if not file.exists():
                _write(file, lower, tokens, lengths)
            return _stored(file, lengths)
        except (OSError, ValueError) as error:
            print(f"The lower layers' outputs are not cached: {error}", file=sys.stderr)
    return uncached_states(lower, tokens)


def uncached_states(lower: HuggingFaceEncoder, tokens: Int[Tensor, "n t"]) -> LowerStates:
    """The hidden states of the tokens of the texts that are asked for, computed each time."""
    lengths = (tokens != lower.padding).sum(1)
    return LowerStates(lengths, lambda rows: _flat_states(lower, tokens[rows]))


@torch.no_grad()
def _flat_states(lower: HuggingFaceEncoder, tokens: Tensor) -> Tensor:
    part = trimmed(tokens, lower.padding).to(next(lower.parameters()).device)
    mask = part != lower.padding
    hidden = lower.backbone(input_ids=part, attention_mask=mask.long()).last_hidden_state
    return hidden[mask].float().cpu()


def _stored(file: Path, lengths: Tensor) -> LowerStates:
    """States that stay on disk; the file's age is that of its last use."""
    flat = torch.from_numpy(np.load(file, mmap_mode="c"))
    if len(flat) != int(lengths.sum()):
        raise ValueError(f"{file} is not whole: delete it.")
    os.utime(file)
    ends = lengths.cumsum(0)

    def of_rows(rows: Tensor) -> Tensor:
        pairs = zip((ends - lengths)[rows].tolist(), ends[rows].tolist(), strict=True)
        return torch.cat([flat[start:end] for start, end in pairs])

    return LowerStates(lengths, of_rows)


def _write(file: Path, lower: HuggingFaceEncoder, tokens: Tensor, lengths: Tensor) -> None:
    """Compute all states into a file that appears when it is whole."""
    print(f"Running {len(tokens):,} texts through the frozen layers once; cached.", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    total, width = int(lengths.sum()), lower.features_dim
    _make_room(file.parent, 4 * total * width)
    ends = lengths.cumsum(0)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        made = Path(scratch) / "states.npy"
        flat = np.lib.format.open_memmap(made, "w+", dtype=np.float32, shape=(total, width))
        for rows in lengths.argsort(stable=True).split(CHUNK):
            parts = _flat_states(lower, tokens[rows]).split(lengths[rows].tolist())
            for row, part in zip(rows.tolist(), parts, strict=True):
                flat[int(ends[row] - lengths[row]) : int(ends[row])] = part.numpy()
        flat.flush()
        made.replace(file)


def _make_room(folder: Path, needed: int) -> None:
    """Delete the states that were unused for longest until so many more bytes fit."""
    kept = sorted(folder.glob("*.npy"), key=lambda file: file.stat().st_mtime)
    held = sum(file.stat().st_size for file in kept)
    while kept and held + needed > LARGEST_CACHE:
        held -= kept[0].stat().st_size
        kept.pop(0).unlink(missing_ok=True)
