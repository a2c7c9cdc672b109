"""Views against torchvision: values step by step, and the distributions they are drawn from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator, random_images
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from offsphere.data import views as views_module
from offsphere.data.views import (
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    SIGMA,
    ViewParameters,
    Views,
    blend_,
    blur_radius,
    colour_matrices,
    crop,
    finish,
    gaussian_blur,
    sample_parameters,
    shift_hue_,
)

PIXEL_TOLERANCE = 2e-6


def random_pixels(batch: int, size: int) -> Tensor:
    return random_images(batch, size, size).float() / 255


def drawn(batch: int = 8, size: tuple[int, int] = (20, 24), seed: int = 0, **changes):
    views = Views(16, blur=0.5, **changes)
    return views, sample_parameters(views, batch, size, generator(seed))


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 32), (48, 40, 16), (20, 24, 33)])
def test_crop_equals_torchvision_resized_crop(height: int, width: int, size: int) -> None:
    images = random_images(16, height, width)
    parameters = sample_parameters(Views(size), 16, (height, width), generator())
    expected = []
    for i in range(16):
        box = [int(getattr(parameters, k)[i]) for k in ("top", "left", "height", "width")]
        view = tv.resized_crop(images[i].float() / 255, *box, size=[size, size], antialias=True)
        expected.append(tv.horizontal_flip(view) if parameters.flip[i] else view)
    torch.testing.assert_close(
        crop(images, parameters, size), torch.stack(expected), atol=PIXEL_TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("kind", "adjust"),
    [
        (BRIGHTNESS, tv.adjust_brightness),
        (CONTRAST, tv.adjust_contrast),
        (SATURATION, tv.adjust_saturation),
    ],
)
def test_blend_equals_torchvision_adjustment(kind: int, adjust) -> None:
    pixels = random_pixels(6, 9)
    factors = torch.tensor([0.0, 0.3, 0.8, 1.0, 1.4, 1.8])
    expected = torch.stack([adjust(p, float(f)) for p, f in zip(pixels, factors, strict=True)])
    blend_(pixels, *colour_matrices(torch.full((6,), kind), factors))
    torch.testing.assert_close(pixels, expected, atol=PIXEL_TOLERANCE, rtol=0)


@settings(max_examples=25, deadline=None)
@given(st.floats(-0.5, 0.5, width=32), st.integers(0, 10_000))
def test_hue_equals_torchvision_hsv_shift(turns: float, seed: int) -> None:
    pixels = random_images(2, 7, 7, seed).float() / 255
    expected = tv.adjust_hue(pixels, turns)
    shift_hue_(pixels, torch.full((2,), turns))
    torch.testing.assert_close(pixels, expected, atol=5e-6, rtol=0)


def test_hue_turns_primary_colours_into_each_other() -> None:
    pixels = torch.eye(3)[:, :, None, None].clone()
    shift_hue_(pixels, torch.full((3,), 1 / 3))
    torch.testing.assert_close(pixels[:, :, 0, 0], torch.eye(3).roll(1, dims=1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [5, 32])
def test_blur_equals_torchvision_gaussian_blur(size: int) -> None:
    pixels = random_pixels(4, size)
    sigma = torch.tensor([0.1, 0.5, 1.3, 2.0])
    radius = blur_radius(2.0, size)
    kernel = [2 * radius + 1] * 2
    expected = torch.stack(
        [tv.gaussian_blur(p, kernel, [float(s)] * 2) for p, s in zip(pixels, sigma, strict=True)]
    )
    torch.testing.assert_close(
        gaussian_blur(pixels, sigma, radius), expected, atol=PIXEL_TOLERANCE, rtol=0
    )


def test_finish_equals_torchvision_greyscale_and_normalise() -> None:
    views, pixels = Views(8), random_pixels(4, 8)
    grey = torch.tensor([True, False, True, False])
    expected = pixels.clone()
    expected[grey] = tv.rgb_to_grayscale(pixels[grey], num_output_channels=3)
    expected = tv.normalize(expected, list(views.mean), list(views.std))
    torch.testing.assert_close(
        finish(pixels, grey, views.mean, views.std), expected, atol=1e-5, rtol=0
    )


def slow_view(image: Tensor, views: Views, parameters: ViewParameters, i: int) -> Tensor:
    """One view, step by step with torchvision's functions."""
    box = [int(getattr(parameters, k)[i]) for k in ("top", "left", "height", "width")]
    view = tv.resized_crop(image.float() / 255, *box, size=[views.image_size] * 2, antialias=True)
    if parameters.flip[i]:
        view = tv.horizontal_flip(view)
    if parameters.jitter[i]:
        adjust = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation)
        steps = [(adjust[k], float(parameters.factors[i, k])) for k in parameters.order[i]]
        steps.insert(int(parameters.hue_turn[i]), (tv.adjust_hue, float(parameters.hue[i])))
        for step, factor in steps:
            view = step(view, factor)
    if parameters.grey[i]:
        view = tv.rgb_to_grayscale(view, num_output_channels=3)
    if parameters.blur[i]:
        side = 2 * blur_radius(SIGMA[1], views.image_size) + 1
        view = tv.gaussian_blur(view, [side, side], [float(parameters.sigma[i])] * 2)
    return tv.normalize(view, list(views.mean), list(views.std))


@pytest.mark.parametrize("chunk_pixels", [1, 16 * 16 * 7, 256 * 1024])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_views_equal_torchvision_step_by_step(
    chunk_pixels: int, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views_module, "CHUNK_PIXELS", chunk_pixels)
    images = random_images(40, 20, 24)
    views, parameters = drawn(40, memory_format=memory_format)
    expected = torch.stack([slow_view(images[i], views, parameters, i) for i in range(40)])
    out = views(images, generator())
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out, expected, atol=5e-5, rtol=0)


def test_same_generator_state_gives_the_same_views_and_advances() -> None:
    images, views = random_images(12, 16, 16), Views(16, blur=0.5)
    stream = generator(3)
    first, second = views(images, stream), views(images, stream)
    again = generator(3)
    assert torch.equal(first, views(images, again))
    assert torch.equal(second, views(images, again))
    assert torch.equal(stream.get_state(), again.get_state())


@settings(max_examples=30, deadline=None)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    scale=st.floats(0.01, 1),
    seed=st.integers(0, 1000),
)
def test_crops_lie_inside_the_image(size: tuple[int, int], scale: float, seed: int) -> None:
    views = Views(4, min_scale=scale)
    p = sample_parameters(views, 32, size, generator(seed))
    for start, length, side in ((p.top, p.height, size[0]), (p.left, p.width, size[1])):
        assert bool((start >= 0).all() and (length >= 1).all())
        assert bool((start + length <= side).all())


def same_distribution(ours: Tensor, theirs: Tensor) -> bool:
    """Two-sample Kolmogorov-Smirnov test at 0.1 per cent (fixed seeds: no flakes)."""
    return stats.ks_2samp(ours.double().numpy(), theirs.double().numpy()).pvalue > 1e-3


@pytest.mark.parametrize("size", [(32, 32), (24, 60)])
@pytest.mark.parametrize("min_scale", [0.08, 0.6])
def test_crops_are_drawn_like_torchvisions(size: tuple[int, int], min_scale: float) -> None:
    draws = 3000
    p = sample_parameters(Views(32, min_scale=min_scale), draws, size, generator(1))
    transform = v2.RandomResizedCrop(32, scale=(min_scale, 1.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        image = torch.zeros(3, *size)
        theirs = [transform.make_params([image]) for _ in range(draws)]
    top, left, height, width = (
        torch.tensor([t[k] for t in theirs]) for k in ("top", "left", "height", "width")
    )
    assert same_distribution(p.height * p.width, height * width)
    assert same_distribution(p.width / p.height, width / height)
    assert same_distribution(p.top, top)
    assert same_distribution(p.left, left)
    assert same_distribution(p.top + p.height, top + height)
    assert same_distribution(p.left + p.width, left + width)


def test_fallback_crop_is_torchvisions() -> None:
    """An image so narrow that no try fits: both take the same central crop."""
    size = (60, 4)
    p = sample_parameters(Views(8, min_scale=0.9), 5, size, generator())
    theirs = v2.RandomResizedCrop(8, scale=(0.9, 1.0)).make_params([torch.zeros(3, *size)])
    for name in ("top", "left", "height", "width"):
        assert getattr(p, name).tolist() == [theirs[name]] * 5


def test_jitter_is_drawn_like_torchvisions() -> None:
    draws, strengths = 4000, (0.4, 0.8, 1.2, 0.1)
    p = sample_parameters(Views(8, jitter=strengths), draws, (8, 8), generator(1))
    transform = v2.ColorJitter(*strengths)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        theirs = [transform.make_params([]) for _ in range(draws)]
    ours = (*p.factors.unbind(1), p.hue)
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    for values, name in zip(ours, names, strict=True):
        assert same_distribution(values, torch.tensor([t[name] for t in theirs])), name


def test_the_four_jitter_steps_come_in_every_order_equally_often() -> None:
    draws = 24_000
    p = sample_parameters(Views(8), draws, (8, 8), generator(1))
    orders = []
    for steps, turn in zip(p.order.tolist(), p.hue_turn.tolist(), strict=True):
        steps.insert(turn, 3)
        orders.append(tuple(steps))
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_switches_are_drawn_with_their_probabilities_and_independently() -> None:
    draws = 20_000
    views = Views(8, flip=0.5, jitter_prob=0.8, grey=0.2, blur=0.3)
    p = sample_parameters(views, draws, (8, 8), generator(1))
    switches = torch.stack([p.flip, p.jitter, p.grey, p.blur]).double()
    for values, probability in zip(switches, (0.5, 0.8, 0.2, 0.3), strict=True):
        hits = int(values.sum())
        assert stats.binomtest(hits, draws, probability).pvalue > 1e-3
    off_diagonal = torch.corrcoef(switches) - torch.eye(4)
    assert off_diagonal.abs().max() < 4 / draws**0.5
    assert stats.kstest(p.sigma.numpy(), stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("name", "always"), [("grey", 1.0), ("flip", 1.0), ("blur", 1.0)])
def test_probability_one_is_always_and_zero_never(name: str, always: float) -> None:
    for probability in (0.0, always):
        views = Views(8, **{name: probability})
        p = sample_parameters(views, 500, (8, 8), generator())
        assert getattr(p, name).double().mean() == probability


def test_identity_settings_return_the_normalised_image() -> None:
    images = random_images(4, 12, 12)
    views = Views(12, min_scale=1.0, flip=0.0, jitter_prob=0.0, grey=0.0)
    expected = tv.normalize(images.float() / 255, list(views.mean), list(views.std))
    torch.testing.assert_close(views(images, generator()), expected, atol=1e-5, rtol=0)
