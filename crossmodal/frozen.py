"""The features of a frozen image tower: computed once per data set, kept in the user's cache."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from crossmodal.captions import Captioned
from offsphere.data.pictures import resize_square
from offsphere.encoders.frozen import FrozenTower
from offsphere.encoders.store import Store, cache_folder
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# Pictures at a time: on a CPU more than a few spend most of their time in fresh pages of memory.
CPU_CHUNK, CHUNK = 8, 64


@lru_cache(maxsize=8)
def frozen_features(tower: FrozenTower, data: Captioned) -> Float[Tensor, "n f"]:
    """The tower's features of all pictures in order, on the CPU."""
    facts = [tower.fingerprint(), data.fingerprint]
    return Store(cache_folder()).get(facts, lambda: {"features": _encode(tower, data)})["features"]


def _encode(tower: FrozenTower, data: Captioned) -> Float[Tensor, "n f"]:
    print(f"Encoding {len(data):,} pictures once; their features are cached.", flush=True)
    device = next(tower.parameters()).device
    mean = torch.tensor(tower.mean, device=device)[:, None, None] * 255
    std = torch.tensor(tower.std, device=device)[:, None, None] * 255
    parts = []
    chunks = torch.arange(len(data)).split(CPU_CHUNK if device.type == "cpu" else CHUNK)
    for rows in track(chunks, len(chunks), "encoding pictures"):
        pixels = resize_square(data.batch(rows), tower.image_size).to(device).float()
        pixels = ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)
        parts.append(tower(pixels).float().cpu())
    return torch.cat(parts)
