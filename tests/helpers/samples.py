"""Pictures, tar files and a small BERT that several tests write."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def random_picture(seed: int, height: int = 8, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), generator=generator).byte()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(batch: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth colour pictures with noise, black, white and grey pixels among them."""
    images = torch.randint(0, 256, (batch, 3, height, width), generator=generator(seed))
    images[:, :, 0, 0] = 0
    images[:, :, 0, 1] = 255
    images[:, :, 1, 0] = 128
    images[:, :, 1, 1] = torch.tensor([200, 100, 100])
    return images.byte()


def encoded(pixels: Tensor, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.save(
        buffer, {"jpg": "jpeg"}.get(kind, kind), **({"quality": 95} if kind == "jpg" else {})
    )
    return buffer.getvalue()


def bomb(side: int = 30_000) -> bytes:
    """A PNG of a few bytes that says it has side x side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def damaged_tiff() -> bytes:
    """A grey TIFF that says where its pixels are by a fraction: PIL raises a TypeError."""
    tags = {0x100: 8, 0x101: 8, 0x102: 8, 0x103: 1, 0x106: 1, 0x115: 1, 0x116: 8, 0x117: 64}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    entries.insert(5, struct.pack("<HHII", 0x111, 5, 1, 300))
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return head.ljust(300, b"\0") + struct.pack("<II", 400, 1).ljust(100, b"\0") + bytes(64)


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
