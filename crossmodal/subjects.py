"""What can be benchmarked: a run of this lane, or any open_clip model; always raw embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from crossmodal.captions import EMOJI_STYLES, Captioned
from crossmodal.evaluate import encode_pictures, encode_texts
from crossmodal.experiment import build_towers
from crossmodal.settings import MODELS, ClipSettings
from offsphere.encoders.clip import (
    ClipTowers,
    published_preprocessing,
    quiet_open_clip,
    registered_name,
)
from offsphere.encoders.weights import fingerprint, why
from offsphere.evaluation.retrieval import Exponents
from offsphere.names import unknown
from offsphere.run.progress import track
from offsphere.training.run import read_run, read_weights

if TYPE_CHECKING:
    from jaxtyping import Float
    from PIL.Image import Image

EMOJI_CLASSES = ("group", "subgroup")
TEXTS_AT_ONCE = 256
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")
LOCAL, HUB = "local-dir:", "hf-hub:"
SAFE_WEIGHTS = "open_clip_model.safetensors"


@dataclass(frozen=True, eq=False)
class Subject:
    """A pair of towers with their own preprocessing and tokenizer."""

    name: str
    pretrained: str
    trained_with: str
    """Name of the cell it was trained with."""
    exponents: Exponents
    """(image, text) exponents of that cell, learned or fixed."""
    fingerprint: str
    """Of the weights and of everything else between a picture or a text and its embedding."""
    image_size: int
    device: torch.device
    preprocess: Callable[[Image], Float[Tensor, "3 s s"]]
    image_tower: Callable[[Tensor], Tensor]
    encode_texts: Callable[[Sequence[str]], Float[Tensor, "t d"]]
    """Raw text embeddings, in float32 on the CPU."""
    encode_squares: Callable[[Captioned], Float[Tensor, "n d"]] | None = None
    """Of a run: the pictures as training cuts and encodes them, so that it gets the numbers that it
    reported; None: whole pictures, by `preprocess` and `image_tower`."""
    data: tuple[str, ...] = ()
    """What it is measured on unless something else is asked for."""
    split: str | None = None

    @torch.inference_mode()
    def encode_images(self, pixels: Float[Tensor, "b 3 s s"]) -> Float[Tensor, "b d"]:
        """Raw image embeddings, in float32 on the CPU."""
        return self.image_tower(pixels.to(self.device)).float().cpu()


class Trained(NamedTuple):
    """The towers of a run, ready to be measured."""

    towers: ClipTowers
    settings: ClipSettings
    exponents: tuple[float, float]
    """Those of the training cell as they stand, learned or fixed."""
    fingerprint: str
    """Of the weights and of how pictures come in."""


def load_run(path: Path) -> Trained:
    """The towers of a run of train_clip.py, finished or cut."""
    folder, settings = read_run(path, {"train_clip": ClipSettings})
    weights = read_weights(folder, settings, "towers", "crossmodal/train_clip.py")
    towers = build_towers(settings, load_pretrained=False)
    try:
        towers.load_state_dict(weights.tensors)
    except RuntimeError as error:
        raise ValueError(f"The weights of {path} do not fit its config.yaml: {error}") from None
    facts = [settings.model, towers.image_size, towers.mean, towers.std]
    if towers.frozen is not None:
        facts.append(towers.frozen.fingerprint())
    towers.eval()
    return Trained(towers, settings, weights.exponents, fingerprint(towers, facts))


def from_run(folder: Path, device: torch.device) -> Subject:
    """The towers of a run of this lane, scored with the cell it was trained with."""
    trained = load_run(folder)
    data, split = trained.settings.data, trained.settings.eval_split
    if split == "test" and trained.settings.data_test is not None:
        data, split = trained.settings.data_test, "all"
    towers = trained.towers.to(device)
    if towers.frozen is not None:
        towers.frozen.to(device)
    return Subject(
        name=trained.settings.model,
        pretrained=folder.resolve().name,
        trained_with=trained.settings.cell,
        exponents=trained.exponents,
        fingerprint=trained.fingerprint,
        image_size=towers.image_size,
        device=device,
        preprocess=towers.preprocess,
        image_tower=towers.encode_image,
        encode_texts=functools.partial(encode_texts, towers),
        encode_squares=functools.partial(encode_pictures, towers),
        data=(data, *(f"{data}:{kind}" for kind in EMOJI_CLASSES if data in EMOJI_STYLES)),
        split=split,
    )


def from_open_clip(name: str, pretrained: str | None, device: torch.device) -> Subject:
    """An open_clip model: NAME and a tag or file, a JSON and a file, local-dir: or hf-hub:."""
    import open_clip

    if name.startswith((LOCAL, HUB)):
        _check_folder(name, pretrained)
    else:
        name = registered_name(name, MODELS)
        pretrained = _checked_pretrained(name, pretrained)
    wanted = {f"image_{key}": x for key, x in published_preprocessing(name, pretrained).items()}
    with _explained(name, pretrained), quiet_open_clip():
        model: Any
        preprocess: Any
        model, _, preprocess = open_clip.create_model_and_transforms(
            name, pretrained, device=device, **wanted
        )
        tokenize = open_clip.get_tokenizer(name)
    model.eval()
    config: dict[str, Any] = open_clip.get_model_preprocess_cfg(model)
    size = config["size"]
    facts = [name, open_clip.get_model_config(name), config, open_clip.__version__]
    return Subject(
        name=name,
        pretrained=pretrained or "local",
        trained_with="cosine",
        exponents=(1.0, 1.0),
        fingerprint=fingerprint(model, facts),
        image_size=size if isinstance(size, int) else min(size),
        device=device,
        preprocess=preprocess,
        image_tower=functools.partial(model.encode_image, normalize=False),
        encode_texts=functools.partial(_texts_by_open_clip, model, tokenize, device),
    )


@torch.inference_mode()
def _texts_by_open_clip(
    model: Any, tokenize: Any, device: torch.device, texts: Sequence[str]
) -> Float[Tensor, "t d"]:
    parts = []
    starts = range(0, len(texts), TEXTS_AT_ONCE)
    for start in track(starts, len(starts), "encoding texts"):
        tokens = tokenize(list(texts[start : start + TEXTS_AT_ONCE])).to(device)
        parts.append(model.encode_text(tokens, normalize=False).float().cpu())
    return torch.cat(parts)


def _checked_pretrained(name: str, pretrained: str | None) -> str:
    import open_clip

    tags = open_clip.list_pretrained_tags_by_model(name)
    if pretrained is None:
        known = f" Tags of {name}: {', '.join(tags)}." if tags else ""
        raise ValueError(
            f"{name} needs --pretrained=FILE or a tag, its weights would be random.{known}"
        )
    if Path(pretrained).is_file():
        return pretrained
    if Path(pretrained).suffix in WEIGHTS or "/" in pretrained:
        raise FileNotFoundError(f"No such file: {pretrained} (the weights of --model={name}).")
    if not open_clip.is_pretrained_cfg(name, pretrained):
        raise unknown(f"pretrained tag of {name}", pretrained, tags or ("a file",))
    return pretrained


def _check_folder(name: str, pretrained: str | None) -> None:
    if pretrained is not None:
        raise ValueError(
            f"--pretrained={pretrained} would be ignored: {name} names both model and weights."
        )
    folder = Path(name.removeprefix(LOCAL))
    if name.startswith(LOCAL) and not (folder / "open_clip_config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no open_clip_config.json: expected a folder with it and the weights, "
            f"{SAFE_WEIGHTS} or open_clip_pytorch_model.bin."
        )


@contextmanager
def _explained(name: str, pretrained: str | None) -> Iterator[None]:
    """Turn what open_clip raises into an error that says what to do."""
    try:
        yield
    except Exception as error:  # on foreign weights and settings open_clip raises anything
        reason = why(error)
        if pretrained is not None and Path(pretrained).is_file():
            raise ValueError(
                f"{pretrained} does not hold weights of {name}: {reason}. Expected a state dict as "
                "open_clip saves it, .pt or .safetensors."
            ) from error
        if name.startswith(LOCAL):
            raise ValueError(f"Cannot load {name}: {reason}.") from error
        raise ValueError(missing_weights(name, pretrained, reason)) from error


def missing_weights(name: str, pretrained: str | None, reason: str) -> str:
    """What to download where, when weights are not on this machine and cannot be fetched."""
    import open_clip
    from huggingface_hub import constants

    config = open_clip.get_pretrained_cfg(name, pretrained) if pretrained else {}
    hub = name.removeprefix(HUB) if name.startswith(HUB) else config.get("hf_hub", "").strip("/")
    ways = []
    if hub:
        ways.append(
            f"download the folder https://huggingface.co/{hub} on a machine with internet (`hf "
            f"download {hub} --local-dir DIR`; open_clip_config.json, the tokenizer files and "
            f"{SAFE_WEIGHTS} or open_clip_pytorch_model.bin are enough), copy DIR here, and pass "
            f"--model={LOCAL}DIR without --pretrained"
        )
        ways.append(f"copy that machine's Hugging Face cache to {constants.HF_HUB_CACHE}")
    if url := config.get("url"):
        model = name
        if config.get("quick_gelu") and not name.endswith("-quickgelu"):
            model = f"{name}-quickgelu"
        ways.append(f"download {url} and pass --model={model} --pretrained=FILE")
    what = f"{name}, {pretrained}" if pretrained else name
    return (
        f"The weights of {what} are not on this machine and could not be fetched "
        f"({reason.rstrip('.')}). Either {', or '.join(ways)}."
    )
