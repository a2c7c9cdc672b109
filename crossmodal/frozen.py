"""The features of a frozen image tower: computed once per data set, kept in the user's cache."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from crossmodal.captions import Captioned
from offsphere.emoji import cache_directory
from offsphere.encoders.frozen import FrozenTower
from offsphere.pictures import resize_square
from offsphere.training.run import save_tensors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# Pictures at a time: on a CPU more than a few spend most of their time in fresh pages of memory.
CPU_CHUNK, CHUNK = 8, 64


@lru_cache(maxsize=8)
def frozen_features(tower: FrozenTower, data: Captioned) -> Float[Tensor, "n f"]:
    """The tower's features of all pictures in order, on the CPU."""
    folder = cache_directory()
    file = None
    if folder is not None:
        file = folder / "features" / f"{tower.fingerprint()}-{data.fingerprint}.safetensors"
        if (kept := _read(file, (len(data), tower.width))) is not None:
            return kept
    device = next(tower.parameters()).device
    mean = torch.tensor(tower.mean, device=device)[:, None, None] * 255
    std = torch.tensor(tower.std, device=device)[:, None, None] * 255
    parts = []
    for rows in torch.arange(len(data)).split(CPU_CHUNK if device.type == "cpu" else CHUNK):
        pixels = resize_square(data.batch(rows), tower.image_size).to(device).float()
        pixels = ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)
        parts.append(tower(pixels).float().cpu())
    features = torch.cat(parts)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, {"features": features})
    return features


def _read(file: Path, shape: tuple[int, int]) -> Tensor | None:
    """Kept features, unless they are missing, damaged or of another shape."""
    try:
        features = load_file(file)["features"]
    except (OSError, SafetensorError, KeyError):
        return None
    return features if features.shape == shape else None
