"""Pictures and tar files that several tests write."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def random_picture(seed: int, height: int = 8, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), generator=generator).byte()


def encoded(pixels: Tensor, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.save(
        buffer, {"jpg": "jpeg"}.get(kind, kind), **({"quality": 95} if kind == "jpg" else {})
    )
    return buffer.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
