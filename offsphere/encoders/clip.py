"""open_clip's towers with raw outputs: only a cell normalises.

A model is a registered open_clip name or a JSON file in open_clip's own form. Weights are drawn
from torch's global generator: call `torch.manual_seed` first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offsphere.data.pictures import normalised, resize_square, to_pixels
from offsphere.encoders.weights import ignore_pickle_warnings, why
from offsphere.names import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from PIL.Image import Image

CAUSAL_POOLS = ("argmax", "eos")
"""Poolings at the end token: in a causal tower nothing that follows it can matter."""


class FrozenTower(nn.Module):
    """An image backbone without gradients, in evaluation mode for good."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        name: str,
        width: int,
        image_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False).eval()
        self.name, self.width, self.image_size = name, width, image_size
        self.mean, self.std = mean, std

    def train(self, mode: bool = True) -> FrozenTower:
        """Evaluation mode, whatever is asked."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, pixels: Float[Tensor, "n 3 s s"]) -> Float[Tensor, "n f"]:
        return self.backbone(pixels).flatten(1)

    def fingerprint(self) -> str:
        """A hash of the weights and of how pictures come in."""
        facts = (self.name, self.width, self.image_size, self.mean, self.std)
        digest = hashlib.sha256(repr(facts).encode())
        for key, tensor in sorted(self.state_dict().items()):
            digest.update(key.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


class ClipTowers(nn.Module):
    """An image tower and a text tower with raw embeddings of one width.

    With a `frozen` image tower, which is not part of the weights that are saved, images are its
    features through a trained linear head.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Callable[[list[str]], Tensor],
        tokenizer_name: str,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        embedding_dim: int,
        frozen: FrozenTower | None = None,
    ) -> None:
        super().__init__()
        # Convolutions run faster in this layout on CPUs, and on GPUs in half precision.
        self.model = model.to(memory_format=torch.channels_last)
        self.tokenizer, self.tokenizer_name = tokenizer, tokenizer_name
        self.image_size, self.mean, self.std = image_size, tuple(mean), tuple(std)
        self._frozen = (frozen,)  # in a tuple: no module of this one
        if frozen is not None:
            self.model.visual = nn.Identity()
            self.head = nn.Linear(frozen.width, embedding_dim)
        for name in ("logit_scale", "logit_bias"):  # the objective has its own
            if isinstance(parameter := getattr(model, name, None), nn.Parameter):
                parameter.requires_grad_(False)

    @property
    def frozen(self) -> FrozenTower | None:
        """The image tower that is not trained, if there is one."""
        return self._frozen[0]

    def encode_image(self, pixels: Float[Tensor, "n 3 s s"]) -> Float[Tensor, "n d"]:
        """Raw embeddings of normalised pictures."""
        if self.frozen is not None:
            return self.encode_features(self.frozen(pixels))
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return self.model.encode_image(pixels, normalize=False)  # pyright: ignore

    def encode_features(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n d"]:
        """Raw embeddings of a frozen tower's features."""
        return self.head(features)

    def encode_text(self, tokens: Int[Tensor, "n c"]) -> Float[Tensor, "n d"]:
        """Raw embeddings of tokens, which `trim` may have cut."""
        text = getattr(self.model, "text", self.model)
        if tokens.shape[1] == getattr(text, "context_length", tokens.shape[1]):
            return self.model.encode_text(tokens, normalize=False)  # pyright: ignore
        return _encode_cut_text(text, tokens)

    def trim(self, tokens: Int[Tensor, "n c"]) -> Int[Tensor, "n l"]:
        """Tokens up to the last end token of any row, where the tower cannot see what follows."""
        text = getattr(self.model, "text", self.model)
        if not _sees_only_the_past(text):
            return tokens
        pool, end = _pooling(text)
        # CLIP's own end token is the highest number of its vocabulary; others tell theirs.
        ends = tokens if pool == "argmax" else (tokens == end).int()
        return tokens[:, : int(ends.argmax(1).max()) + 1]

    def tokenize(self, texts: Sequence[str]) -> Int[Tensor, "n c"]:
        """The tokens of texts, in open_clip's own tokenizer."""
        return self.tokenizer(list(texts))

    def preprocess(self, picture: Image) -> Float[Tensor, "3 s s"]:
        """A picture as this model is evaluated on it: short side resized, centre cropped."""
        return self.normalise(resize_square(to_pixels(picture)[None], self.image_size))[0]

    def normalise(self, pixels: Tensor) -> Float[Tensor, "n 3 s s"]:
        """Pixels from 0 to 255 as the tower wants them."""
        return normalised(pixels, self.mean, self.std)


def clip_towers(
    model: str,
    *,
    pretrained: str | None = None,
    load_pretrained: bool = True,
    image_size: int | None = None,
    frozen: FrozenTower | None = None,
    models: Path | None = None,
) -> ClipTowers:
    """The towers of an open_clip name, of a JSON file, or of NAME.json in the folder `models`.

    `pretrained` is one of open_clip's tags or a local file of its weights; `image_size` overrides
    the model's own. `load_pretrained=False` takes the mean and std that `pretrained` implies
    without reading its weights: others are about to be loaded.
    """
    import open_clip

    name = registered_name(model, models)
    config: dict[str, Any] = open_clip.get_model_config(name)  # pyright: ignore
    with quiet_open_clip():
        try:
            built = open_clip.create_model(
                name,
                pretrained if load_pretrained else None,
                force_image_size=image_size,
                pretrained_text=False,
                force_preprocess_cfg=published_preprocessing(name, pretrained),
                require_pretrained=load_pretrained and pretrained is not None,
            )
        except Exception as error:  # on foreign weights and settings open_clip raises anything
            reason = why(error) if pretrained else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"The model {model}{f' with {pretrained}' if pretrained else ''} cannot be built: "
                f"{reason}. Weights may be a local file; tags need a network or a filled cache."
            ) from error
        tokenizer = _tokenizer(model, name, config)
    if frozen is not None:
        size, mean, std = frozen.image_size, frozen.mean, frozen.std
    else:
        facts: dict[str, Any] = open_clip.get_model_preprocess_cfg(built)  # pyright: ignore
        size, mean, std = facts["size"], facts["mean"], facts["std"]
        size = size if isinstance(size, int) else size[0]
    return ClipTowers(
        built,
        tokenizer,
        name,
        image_size=size,
        mean=mean,
        std=std,
        embedding_dim=config["embed_dim"],
        frozen=frozen,
    )


def _tokenizer(model: str, name: str, config: dict[str, Any]) -> Callable[[list[str]], Tensor]:
    import open_clip

    try:
        return open_clip.get_tokenizer(name)
    except Exception as error:  # the hub, transformers and sentencepiece each raise their own
        from huggingface_hub import constants

        said = config["text_cfg"].get("hf_tokenizer_name", "open_clip's own")
        raise ValueError(
            f"The tokenizer of the model {model} ({said}) is not on this machine and could not be "
            "fetched: run once with a network, or copy another machine's Hugging Face cache to "
            f"{constants.HF_HUB_CACHE}."
        ) from error


def registered_name(model: str, models: Path | None = None) -> str:
    """open_clip's name for a model, which is registered first if it is a JSON file."""
    import open_clip

    file = Path(model)
    if file.suffix != ".json":
        file = (models or Path()) / f"{model}.json"
        if model in open_clip.list_models() or models is None or not file.is_file():
            if model not in open_clip.list_models():
                shipped = sorted(f.stem for f in models.glob("*.json")) if models else []
                raise unknown("model", model, (*shipped, *open_clip.list_models()))
            return model
    try:
        parts = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The model file {file} cannot be read: {error}.") from error
    if not isinstance(parts, dict):
        raise ValueError(f"{file} is no open_clip model: expected an object in braces.")
    missing = {"embed_dim", "vision_cfg", "text_cfg"} - set(parts)
    if missing:
        raise ValueError(
            f"{file} is no open_clip model: it lacks {', '.join(sorted(missing))}. configs/models "
            "has examples."
        )
    if file.stem in open_clip.list_models() and open_clip.get_model_config(file.stem) != parts:
        raise ValueError(
            f"open_clip has another model called {file.stem}: give {file} another name."
        )
    open_clip.add_model_config(file)
    return file.stem


def published_preprocessing(name: str, pretrained: str | None) -> dict[str, Any]:
    """How published weights want their pictures: a tag's own way or, of a file, that of all tags.

    open_clip knows this for tags only: a file would silently get OpenAI's mean and std.
    """
    import open_clip

    if pretrained is None:
        return {}
    tags = open_clip.list_pretrained_tags_by_model(name)
    named = [pretrained] if open_clip.is_pretrained_cfg(name, pretrained) else tags
    configs = [open_clip.get_pretrained_cfg(name, tag) for tag in named]
    keys = ("mean", "std", "interpolation", "resize_mode")
    return {
        key: configs[0][key]
        for key in keys
        if configs and key in configs[0] and all(c.get(key) == configs[0][key] for c in configs)
    }


@contextmanager
def quiet_open_clip() -> Iterator[None]:
    """Silence open_clip: random weights, of which it warns, are meant; errors are raised anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            ignore_pickle_warnings()
            yield
    finally:
        logging.disable(before)


def _sees_only_the_past(text: nn.Module) -> bool:
    """Whether a text tower is causal and pooled at the end token."""
    return (
        _pooling(text)[0] in CAUSAL_POOLS
        and isinstance(getattr(text, "attn_mask", None), Tensor)
        and getattr(text, "cls_emb", None) is None
        and not getattr(text, "use_pad_mask", False)
    )


def _pooling(text: Any) -> tuple[str, int | None]:
    """How a text tower pools, and its end token; CLIP itself has other names for them."""
    pool = getattr(text, "text_pool_type", getattr(text, "pool_type", ""))
    return pool, getattr(text, "text_eos_id", getattr(text, "eos_id", None))


def _encode_cut_text(text: Any, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n d"]:
    """open_clip's text tower on fewer positions than it was built for."""
    from open_clip.transformer import text_global_pool

    length, dtype = tokens.shape[1], text.transformer.get_cast_dtype()
    x = text.token_embedding(tokens).to(dtype) + text.positional_embedding[:length].to(dtype)
    x = text.ln_final(text.transformer(x, attn_mask=text.attn_mask[:length, :length]))
    pool, end = _pooling(text)
    x = text_global_pool(x, tokens, pool, eos_token_id=end)
    projection = text.text_projection
    if projection is None:
        return x
    return projection(x) if isinstance(projection, nn.Linear) else x @ projection
