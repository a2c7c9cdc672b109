"""Data that a caller brings along: `run(config, data=Handed(...))`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from torch import Tensor


@dataclass(frozen=True)
class Handed:
    """Splits of a data set that has no name a flag could give.

    What a split is depends on the lane: a `torch.utils.data.Dataset` of images or of (image,
    label), one of (image, caption or captions), or an iterable of (query, document) or of
    (sentence, sentence, score). Nothing of it is hashed: the caller says with the fingerprint when
    the content has changed, and a run does not resume with another one.
    """

    name: str
    """Stands for the data in the run's identity, as `--data` does for data with a name."""
    fingerprint: str
    train: Any
    test: Any = None
    validation: Any = None
    classes: tuple[str, ...] = ()
    """Names of an image set's labels; default: their numbers."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name):
            raise ValueError(
                f"Handed data need a name of letters, digits, . _ + and -, got {self.name!r}."
            )
        if not self.fingerprint:
            raise ValueError(
                f"The handed data {self.name} need a fingerprint, such as a version or a hash."
            )

    def measured(self, eval_split: str) -> Any:
        """The split that a run measures."""
        found = self.validation if eval_split == "validation" else self.test
        if found is None:
            raise ValueError(
                f"The handed data {self.name} have no {eval_split} split, which is measured: hand "
                f"in Handed({eval_split}=...), or set eval_split."
            )
        return found


def refuse_named(data: str) -> None:
    """Refuse settings that name handed data where none were handed in."""
    if data.startswith("handed:"):
        raise ValueError(
            f"--data={data} names data that are handed in from Python: call run(config, "
            f"data=Handed(name={data.removeprefix('handed:')!r}, ...))."
        )


def square_pixels(images: Iterable[Any], size: int, name: str) -> UInt8[Tensor, "n 3 size size"]:
    """Images in memory: PIL pictures, or (3, h, w) bytes as tensors or arrays."""
    import torch
    from PIL.Image import Image

    from offsphere.data.pictures import resize_square, to_pixels

    squares = []
    for row, image in enumerate(images):
        pixels = to_pixels(image) if isinstance(image, Image) else torch.as_tensor(image)
        if pixels.ndim != 3 or pixels.shape[0] != 3 or pixels.dtype != torch.uint8:
            raise ValueError(
                f"Image {row} of the handed data {name}: expected a PIL picture or (3, h, w) bytes "
                f"from 0 to 255, got {tuple(pixels.shape)} of {pixels.dtype}."
            )
        squares.append(resize_square(pixels[None], size))
    if len(squares) < 2:
        raise ValueError(f"A split of the handed data {name} has fewer than 2 images.")
    return torch.cat(squares)
