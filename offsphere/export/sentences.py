"""A text encoder with its cell as a model of sentence-transformers.

A cell acts on each side alone, so its score is a dot product of what two routes give: the exponent
1 is a `Normalize` at a route's end, 0 is nothing, and any other is the one small module `Shrink`,
whose file goes into the folder. Needs the package sentence-transformers (extra `interop`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule, Module, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from sentence_transformers.util import import_module_class
from tokenizers import Tokenizer
from torch import Tensor

from offsphere.encoders.static import StaticEncoder, WordPieces, Words
from offsphere.encoders.text import HuggingFaceEncoder, ScratchEncoder, TextEncoder
from offsphere.export import shrink
from offsphere.export.shrink import Shrink

WEIGHTS, WORDS = "model.safetensors", "words.json"
SHRINK_TYPE = "shrink.Shrink"
"""The name of `Shrink` in an export: that of the file beside it."""


class OwnEncoder(InputModule):
    """An encoder that only offsphere has: `scratch`, or `static` with words instead of pieces."""

    config_file_name = "offsphere_encoder.json"

    def __init__(self, encoder: ScratchEncoder | StaticEncoder, max_length: int) -> None:
        super().__init__()
        self.encoder, self.max_seq_length = encoder, max_length

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_unused: Any) -> Any:
        texts = [(prompt or "") + text for text in inputs]
        if isinstance(self.encoder, StaticEncoder):
            return {"input_ids": self.encoder.numbers(texts, self.max_seq_length)}
        return {"input_ids": self.encoder.tokenize(texts, self.max_seq_length)}

    def forward(self, features: dict[str, Tensor], **_unused: Any) -> dict[str, Tensor]:
        features["sentence_embedding"] = self.encoder(features["input_ids"])
        return features

    def get_embedding_dimension(self) -> int:
        return self.encoder.features_dim

    def get_config_dict(self) -> dict[str, Any]:
        config: dict[str, Any] = {"kind": "words", "max_length": self.max_seq_length}
        if isinstance(self.encoder, ScratchEncoder):
            config |= {"kind": "scratch", "shape": self.encoder.shape()}
        return config

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        self.save_config(output_path)
        state = {name: x.contiguous() for name, x in self.encoder.state_dict().items()}
        save_file(state, Path(output_path) / WEIGHTS)
        pieces = getattr(self.encoder, "pieces", None)
        if isinstance(pieces, Words) and pieces.vocabulary is not None:
            (Path(output_path) / WORDS).write_text(json.dumps(list(pieces.vocabulary)))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **_unused: Any) -> OwnEncoder:
        folder = Path(model_name_or_path) / subfolder
        config = json.loads((folder / cls.config_file_name).read_text())
        state = load_file(folder / WEIGHTS)
        if config["kind"] == "scratch":
            encoder = ScratchEncoder(**config["shape"])
        else:
            words = folder / WORDS
            known = json.loads(words.read_text()) if words.is_file() else None
            pieces = Words(known and {word: 1 + row for row, word in enumerate(known)})
            encoder = StaticEncoder(pieces, torch.zeros_like(state["vectors"]))
        encoder.load_state_dict(state)
        return cls(encoder, config["max_length"])


OWN_TYPES = {
    SHRINK_TYPE: Shrink,
    f"{OwnEncoder.__module__}.{OwnEncoder.__name__}": OwnEncoder,
}


def encoder_modules(encoder: TextEncoder, max_length: int) -> Sequence[Module]:
    """What gives sentence-transformers the encoder's raw vectors."""
    if isinstance(encoder, HuggingFaceEncoder):
        longest = getattr(encoder.backbone.config, "max_position_embeddings", max_length)
        with tempfile.TemporaryDirectory() as scratch:
            encoder.backbone.save_pretrained(scratch)
            encoder.tokenizer.save_pretrained(scratch)
            transformer = Transformer(scratch, max_seq_length=min(max_length, longest))
        pooling: Any = encoder.pooling
        return [transformer, Pooling(encoder.features_dim, pooling)]
    if isinstance(encoder, StaticEncoder) and isinstance(encoder.pieces, WordPieces):
        tokenizer = Tokenizer.from_str(encoder.pieces.tokenizer.backend_tokenizer.to_str())
        tokenizer.enable_truncation(max_length)
        return [StaticEmbedding(tokenizer, embedding_weights=encoder.vectors.detach())]
    return [OwnEncoder(encoder, max_length)]


def make_model(
    sides: Sequence[Sequence[Module]], exponents: tuple[float, float], prompts: Mapping[str, str]
) -> SentenceTransformer:
    """The model whose `similarity` is the cell's score.

    `sides` are the modules of both sides, or of the query's and the document's. Where the sides
    differ there is no default route: `encode_query` and `encode_document` say which one is meant.
    """
    ends = [_ending(exponent) for exponent in exponents]
    if len(sides) == 1 and exponents[0] == exponents[1]:
        modules: list[Module] = [*sides[0], *ends[0]]
    else:
        routes = {
            name: [*side, *end]
            for name, side, end in zip(
                ("query", "document"), (sides[0], sides[-1]), ends, strict=True
            )
        }
        modules = [Router(routes, allow_empty_key=False)]
    similarity = "cosine" if exponents == (1.0, 1.0) else "dot"
    given = {name: text for name, text in prompts.items() if text}
    return SentenceTransformer(
        modules=list(modules), similarity_fn_name=similarity, prompts=given, device="cpu"
    )


def save_model(model: SentenceTransformer, folder: Path) -> None:
    """Write the folder that `SentenceTransformer(folder)` reads, without a card."""
    model.save(str(folder), create_model_card=False)
    for file in (folder / "modules.json", folder / "router_config.json"):
        if file.is_file() and (ours := f"{Shrink.__module__}.{Shrink.__name__}") in (
            text := file.read_text()
        ):
            file.write_text(text.replace(ours, SHRINK_TYPE))
            shutil.copy(str(shrink.__file__), folder / "shrink.py")


def load_model(folder: str | Path) -> SentenceTransformer:
    """`SentenceTransformer(folder)` of an export, by this package's own modules.

    sentence-transformers imports modules that are not its own only with trust_remote_code, which
    would run a file of the folder. Nothing of the folder is run here.
    """
    folder = Path(folder)
    file, facts = folder / "modules.json", folder / "config_sentence_transformers.json"
    if not (file.is_file() and facts.is_file()):
        raise ValueError(f"{folder} is no export for sentence-transformers: no {file.name}.")
    modules: list[Any] = []
    for module in json.loads(file.read_text()):
        kind: Any = OWN_TYPES.get(module["type"]) or import_module_class(
            module["type"], str(folder)
        )
        given: dict[str, Any] = {"module_classes": OWN_TYPES} if kind is Router else {}
        given |= {"subfolder": module["path"], "local_files_only": True}
        modules.append(kind.load(str(folder), **given))
    config = json.loads(facts.read_text())
    return SentenceTransformer(
        modules=modules,
        similarity_fn_name=config["similarity_fn_name"],
        prompts=config["prompts"],
        device="cpu",
    )


def needs_own_code(folder: Path) -> str | None:
    """Where modules are from that sentence-transformers does not have, if there are any."""
    text = "".join(
        file.read_text()
        for file in (folder / "modules.json", folder / "router_config.json")
        if file.is_file()
    )
    if OwnEncoder.__module__ in text:
        return "offsphere"
    return "shrink.py" if SHRINK_TYPE in text else None


def _ending(exponent: float) -> list[Module]:
    if exponent == 0.0:
        return []
    return [Normalize()] if exponent == 1.0 else [Shrink(exponent)]
