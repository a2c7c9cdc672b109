"""Pictures, tar files and a small BERT that several tests write."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
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


def write_bert(path: Path, words: Sequence[str], layers: int = 1, positions: int = 32) -> Path:
    """A BERT of 16 random features that knows the words, as transformers saves it."""
    from transformers import BertConfig, BertModel, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=layers,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=positions,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    return path
