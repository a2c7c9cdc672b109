"""lightly's own views beside ours, and the gallery."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from lightly.transforms.simclr_transform import SimCLRViewTransform
from PIL import Image
from samples import generator, random_images
from scipy import stats
from torch import Tensor

from offsphere.data.lightly_views import gallery, lightly_views
from offsphere.data.views import (
    Views,
)


def same_distribution(ours: Tensor, theirs: Tensor) -> bool:
    """Two-sample Kolmogorov-Smirnov test at 0.1 per cent (fixed seeds: no flakes)."""
    return stats.ks_2samp(ours.double().numpy(), theirs.double().numpy()).pvalue > 1e-3


def test_lightly_views_are_lightlys_own_transform_with_the_same_settings() -> None:
    images, chosen = random_images(5, 32, 32), Views(24, blur=0.5, min_scale=0.2)
    ours = lightly_views(chosen)(images, generator(4))
    seed = int(torch.randint(2**31, (), generator=generator(4)))
    theirs = SimCLRViewTransform(
        24,
        cj_bright=0.4,
        cj_contrast=0.4,
        cj_sat=0.4,
        cj_hue=0.1,
        min_scale=0.2,
        gaussian_blur=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        pictures = [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images]
        expected = torch.stack([theirs.transform(picture) for picture in pictures])
    assert torch.equal(ours, expected)


def test_lightly_views_leave_the_global_streams_alone() -> None:
    images, maker = random_images(3, 16, 16), lightly_views(Views(16, blur=0.5))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    stream = generator(1)
    first, second = maker(images, stream), maker(images, stream)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]
    again = generator(1)
    assert torch.equal(first, maker(images, again))
    assert torch.equal(second, maker(images, again))


def test_lightly_and_batched_views_have_the_same_pixel_statistics() -> None:
    """Per-view mean and contrast of the same pictures, drawn 600 times by each."""
    images = random_images(1, 8, 8).float()
    images = torch.nn.functional.interpolate(images, 32, mode="bicubic").clamp(0, 255).byte()
    images = images.expand(600, -1, -1, -1).contiguous()
    chosen = Views(32, blur=0.5, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    ours, theirs = (maker(images, generator(5)) for maker in (chosen, lightly_views(chosen)))
    assert same_distribution(ours.mean((1, 2, 3)), theirs.mean((1, 2, 3)))
    assert same_distribution(ours.mean((2, 3))[:, 0], theirs.mean((2, 3))[:, 0])
    assert same_distribution(ours.std((1, 2, 3)), theirs.std((1, 2, 3)))


def test_gallery_shows_originals_and_views(tmp_path: Path) -> None:
    images, views = random_images(3, 32, 32), Views(32)
    path = tmp_path / "new" / "views.png"
    gallery(images, views, path, generator())
    picture = np.asarray(Image.open(path))
    assert picture.shape == (3 * 100 + 4, 9 * 100 + 4, 3)
    original = picture[4:100:3, 4:100:3]
    assert np.array_equal(original, images[0].permute(1, 2, 0).numpy())
    first = views(images, generator())[0]
    shown = torch.from_numpy(picture[4:100:3, 104:200:3].copy()).permute(2, 0, 1).float()
    mean, std = (torch.tensor(v)[:, None, None] for v in (views.mean, views.std))
    torch.testing.assert_close(shown, (first * std + mean) * 255, atol=0.51, rtol=0)
