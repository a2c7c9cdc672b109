"""lightly's own transform behind the call of `offsphere.data.views`, and a gallery."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from offsphere.data.views import SIGMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jaxtyping import Float, UInt8
    from PIL.Image import Image
    from torch import Tensor

    from offsphere.data.views import Views

COLUMNS = 8
"""Views of each picture in the gallery."""


@dataclass(frozen=True)
class LightlyViews:
    """lightly's own transform, sample by sample on PIL images, behind the call of `Views`."""

    transform: Callable[[Image], Tensor]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(
        self, images: UInt8[Tensor, "b 3 h w"], generator: torch.Generator
    ) -> Float[Tensor, "b 3 s s"]:
        """One random view of each image; the generator seeds the global streams lightly uses."""
        from torchvision.transforms.v2.functional import to_pil_image

        pictures = [to_pil_image(image) for image in images.cpu()]
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        with _global_streams(seed):
            views = torch.stack([self.transform(picture) for picture in pictures])
        return views.to(images.device)


def lightly_views(settings: Views) -> LightlyViews:
    """lightly's SimCLR view transform (MoCo's is the same one with other values)."""
    from lightly.transforms.simclr_transform import SimCLRViewTransform

    brightness, contrast, saturation, hue = settings.jitter
    transform = SimCLRViewTransform(
        input_size=settings.image_size,
        cj_prob=settings.jitter_prob,
        cj_strength=1.0,
        cj_bright=brightness,
        cj_contrast=contrast,
        cj_sat=saturation,
        cj_hue=hue,
        min_scale=settings.min_scale,
        random_gray_scale=settings.grey,
        gaussian_blur=settings.blur,
        sigmas=SIGMA,
        hf_prob=settings.flip,
        normalize={"mean": list(settings.mean), "std": list(settings.std)},
    )
    return LightlyViews(transform.transform, settings.image_size, settings.mean, settings.std)


@contextmanager
def _global_streams(seed: int) -> Iterator[None]:
    """Seed the global streams of torch, numpy and random, and put them back afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


def gallery(
    images: UInt8[Tensor, "b 3 h w"],
    views: Views | LightlyViews,
    path: Path,
    generator: torch.Generator,
) -> None:
    """Save a picture with one row per image: the original, then COLUMNS random views of it."""
    from torchvision.utils import save_image

    size = views.image_size
    originals = torch.nn.functional.interpolate(
        images.float() / 255.0, (size, size), mode="bilinear", antialias=True
    )
    mean = torch.tensor(views.mean, device=images.device)[:, None, None]
    std = torch.tensor(views.std, device=images.device)[:, None, None]
    drawn = [views(images, generator) * std + mean for _ in range(COLUMNS)]
    tiles = torch.stack([originals, *drawn], 1).flatten(0, 1).clamp(0.0, 1.0)
    enlarged = max(1, round(96 / size))
    tiles = tiles.repeat_interleave(enlarged, 2).repeat_interleave(enlarged, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_image(tiles, path, nrow=COLUMNS + 1, padding=4, pad_value=0.8)
