"""Random views of images, drawn and computed for a whole batch at once.

`Views` is SimCLR's and MoCo's augmentation: random resized crop, flip, colour jitter, greyscale,
blur, normalise. Every sample has its own random parameters, drawn from one generator in a fixed
order, with the distributions of torchvision (10 tries per crop; its own order of the four jitter
steps for every sample). Pixel values are floats in [0, 1] throughout and are clamped after each
jitter step; torchvision and lightly on PIL images round to 8 bits in between. The hue step is
the exact HSV shift.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt8
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# torchvision's luminance weights (they sum to 0.9999).
LUMINANCE = (0.2989, 0.587, 0.114)
BRIGHTNESS, CONTRAST, SATURATION = 0, 1, 2
CROP_TRIES, CROP_RATIO = 10, (3 / 4, 4 / 3)
SIGMA = (0.1, 2.0)
"""Range of the blur's standard deviation in pixels of the view."""
# Pixels computed at a time on a CPU: the temporaries then stay in the processor's cache.
CHUNK_PIXELS = 256 * 1024


@dataclass(frozen=True, eq=False)
class ViewParameters:
    """What was drawn for each sample of a batch, in the order in which it is applied."""

    top: Int[Tensor, " b"]
    left: Int[Tensor, " b"]
    height: Int[Tensor, " b"]
    width: Int[Tensor, " b"]
    flip: Bool[Tensor, " b"]
    jitter: Bool[Tensor, " b"]
    factors: Float[Tensor, "b 3"]
    """Brightness, contrast and saturation factors."""
    hue: Float[Tensor, " b"]
    """Hue shift in turns."""
    order: Int[Tensor, "b 3"]
    """The order in which brightness (0), contrast (1) and saturation (2) are applied."""
    hue_turn: Int[Tensor, " b"]
    """How many of these three come before the hue shift, 0 to 3."""
    grey: Bool[Tensor, " b"]
    blur: Bool[Tensor, " b"]
    sigma: Float[Tensor, " b"]

    def __len__(self) -> int:
        return len(self.top)

    def take(self, index: Int[Tensor, " k"] | slice) -> ViewParameters:
        """The parameters of some of the samples."""
        return ViewParameters(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device) -> ViewParameters:
        """The same parameters on another device."""
        return ViewParameters(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True)
class Views:
    """Random views of side `image_size`; `views(images, generator)` draws one of each image."""

    image_size: int
    min_scale: float = 0.08
    """Smallest crop, as a share of the image's area."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    """Strength of brightness, contrast, saturation and hue."""
    jitter_prob: float = 0.8
    grey: float = 0.2
    blur: float = 0.0
    """Probability of a Gaussian blur."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    memory_format: torch.memory_format = torch.contiguous_format

    @torch.no_grad()
    def __call__(
        self, images: UInt8[Tensor, "b 3 h w"], generator: torch.Generator
    ) -> Float[Tensor, "b 3 s s"]:
        """One random view of each image, normalised."""
        batch, _, height, width = images.shape
        return self.render(images, sample_parameters(self, batch, (height, width), generator))

    @torch.no_grad()
    def render(
        self, images: UInt8[Tensor, "b 3 h w"], parameters: ViewParameters
    ) -> Float[Tensor, "b 3 s s"]:
        """The views that these parameters describe."""
        # Samples whose hue shift comes at the same turn stand together, those without jitter last.
        turn = torch.where(parameters.jitter, parameters.hue_turn, 4)
        order = torch.argsort(turn, stable=True)
        turns = turn[order].tolist()
        parameters = parameters.take(order).to(images.device)
        images = images.index_select(0, order.to(images.device))
        rows = len(images) if images.is_cuda else max(1, CHUNK_PIXELS // self.image_size**2)
        chunks = [slice(start, start + rows) for start in range(0, len(images), rows)]
        sorted_views = [_render(self, images[c], parameters.take(c), turns[c]) for c in chunks]
        out = torch.cat(sorted_views).index_select(0, torch.argsort(order).to(images.device))
        return out.contiguous(memory_format=self.memory_format)


def sample_parameters(
    views: Views, batch: int, size: tuple[int, int], generator: torch.Generator
) -> ViewParameters:
    """Draw the parameters of one view for each of `batch` images of `size` (height, width)."""
    columns = 2 * CROP_TRIES + 2 + 1 + 1 + 4 + 4 + 1 + 2
    numbers = torch.rand(batch, columns, generator=generator, device=generator.device)
    draws = iter(numbers.to("cpu").unbind(1))

    def uniform(low: float, high: float, count: int = 1) -> Tensor:
        values = torch.stack([next(draws) for _ in range(count)], 1)
        return low + (high - low) * values

    areas = uniform(views.min_scale, 1.0, CROP_TRIES)
    log_ratios = uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1]), CROP_TRIES)
    height, width, found = crop_sizes(areas, log_ratios.exp_(), size)
    top = crop_start(size[0] - height, next(draws), found)
    left = crop_start(size[1] - width, next(draws), found)
    flip = next(draws) < views.flip
    jitter = next(draws) < views.jitter_prob
    factors = torch.cat([uniform(max(0.0, 1 - s), 1 + s) for s in views.jitter[:3]], 1)
    hue = uniform(-views.jitter[3], views.jitter[3])[:, 0]
    # Ranks of four uniform numbers are a uniform permutation of the four jitter steps.
    steps = uniform(0.0, 1.0, 4)
    return ViewParameters(
        top=top,
        left=left,
        height=height,
        width=width,
        flip=flip,
        jitter=jitter,
        factors=factors,
        hue=hue,
        order=steps[:, :3].argsort(1),
        hue_turn=(steps[:, :3] < steps[:, 3:]).sum(1),
        grey=next(draws) < views.grey,
        blur=next(draws) < views.blur,
        sigma=uniform(*SIGMA)[:, 0],
    )


def crop_sizes(
    areas: Float[Tensor, "b tries"],
    ratios: Float[Tensor, "b tries"],
    size: tuple[int, int],
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"], Bool[Tensor, " b"]]:
    """Heights and widths of the first try that fits, and whether one did (else the fallback)."""
    pixels = areas * (size[0] * size[1])
    widths = (pixels * ratios).sqrt_().round_().long()
    heights = (pixels / ratios).sqrt_().round_().long()
    fits = (widths > 0) & (widths <= size[1]) & (heights > 0) & (heights <= size[0])
    first = fits.byte().argmax(1, keepdim=True)
    found = fits.any(1)
    fallback = fallback_crop(size)
    height = torch.where(found, heights.gather(1, first)[:, 0], fallback[0])
    width = torch.where(found, widths.gather(1, first)[:, 0], fallback[1])
    return height, width, found


def fallback_crop(size: tuple[int, int]) -> tuple[int, int]:
    """The largest crop whose ratio is allowed, taken when no try fitted."""
    height, width = size
    least, most = CROP_RATIO
    if width / height < least:
        return round(width / least), width
    if width / height > most:
        return height, round(height * most)
    return height, width


def crop_start(
    slack: Int[Tensor, " b"], place: Float[Tensor, " b"], found: Bool[Tensor, " b"]
) -> Int[Tensor, " b"]:
    """First row of a crop with `slack` rows to spare: uniform, or central for the fallback."""
    # float32 rounding could bring place * (slack + 1) up to slack + 1 itself.
    uniform = torch.minimum((place * (slack + 1)).long(), slack)
    return torch.where(found, uniform, slack // 2)


def _render(
    views: Views,
    images: UInt8[Tensor, "b 3 h w"],
    parameters: ViewParameters,
    turns: list[int],
) -> Float[Tensor, "b 3 s s"]:
    """Views of samples that are sorted by `turns`: their hue turn, or 4 for no jitter."""
    view = crop(images, parameters, views.image_size)
    jittered = bisect_left(turns, 4)
    factors = parameters.factors.gather(1, parameters.order)
    matrices, contrast = colour_matrices(parameters.order, factors)
    for step in range(4):
        now = slice(bisect_left(turns, step), bisect_left(turns, step + 1))
        shift_hue_(view[now], parameters.hue[now])
        if step < 3:
            blend_(view[:jittered], matrices[:jittered, step], contrast[:jittered, step])
    blurred = parameters.blur.nonzero()[:, 0]
    radius = blur_radius(SIGMA[1], views.image_size)
    if len(blurred) and radius:
        sigma = parameters.sigma[blurred]
        view[blurred] = gaussian_blur(view.index_select(0, blurred), sigma, radius)
    return finish(view, parameters.grey, views.mean, views.std)


def crop(
    images: UInt8[Tensor, "b 3 h w"], parameters: ViewParameters, size: int
) -> Float[Tensor, "b 3 s s"]:
    """Crop, resize (bilinear, antialiased) and flip each image; values in [0, 1].

    Resizing is two small matrices per sample, one per axis; the flip reverses the rows of one.
    """
    batch, _, height, width = images.shape
    rows = interpolation(parameters.top, parameters.height, height, size)
    columns = interpolation(parameters.left, parameters.width, width, size, parameters.flip)
    # (b, h, 3, w): one product per sample and axis instead of one per channel.
    pixels = images.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    pixels = torch.bmm(rows.div_(255.0), pixels.view(batch, height, 3 * width))
    pixels = torch.bmm(pixels.view(batch, size * 3, width), columns.transpose(1, 2))
    return pixels.view(batch, size, 3, size).transpose(1, 2).contiguous()


def interpolation(
    start: Int[Tensor, " b"],
    length: Int[Tensor, " b"],
    size_in: int,
    size_out: int,
    flip: Bool[Tensor, " b"] | None = None,
) -> Float[Tensor, "b size_out size_in"]:
    """Matrices that resize the pixels [start, start + length) to `size_out`, antialiased."""
    device = start.device
    stretch = length.float() / size_out
    support = stretch.clamp(min=1.0)
    target = torch.arange(size_out, device=device).expand(len(start), -1)
    if flip is not None:
        target = torch.where(flip[:, None], size_out - 1 - target, target)
    centre = (target + 0.5) * stretch[:, None] + start[:, None]
    source = torch.arange(size_in, device=device)
    inside = (source >= start[:, None]) & (source < (start + length)[:, None])
    weights = ((source + 0.5) / support[:, None])[:, None, :] - (centre / support[:, None])[
        :, :, None
    ]
    weights = weights.abs_().neg_().add_(1.0).clamp_(min=0.0)
    weights *= inside.float()[:, None, :]
    return weights.div_(weights.sum(2, keepdim=True))


def colour_matrices(
    kind: Int[Tensor, "*b"], factor: Float[Tensor, "*b"]
) -> tuple[Float[Tensor, "*b 3 3"], Float[Tensor, "*b"]]:
    """A jitter step as a colour matrix, and the weight of the image's mean luminance beside it.

    A step is factor x + (1 - factor) base; the base is black for brightness, the image's mean
    luminance for contrast, and each pixel's own luminance for saturation.
    """
    rest = 1.0 - factor
    luminance = torch.tensor(LUMINANCE, device=factor.device)
    matrix = torch.diag_embed(factor[..., None].expand(*factor.shape, 3))
    matrix += (rest * (kind == SATURATION))[..., None, None] * luminance
    return matrix, rest * (kind == CONTRAST)


def blend_(
    pixels: Float[Tensor, "b 3 h w"], matrix: Float[Tensor, "b 3 3"], contrast: Float[Tensor, " b"]
) -> None:
    """One jitter step on each image, in place: clamp(matrix x + contrast mean luminance)."""
    if not len(pixels):
        return
    flat = pixels.flatten(2)
    mean = flat.mean(2) @ torch.tensor(LUMINANCE, device=pixels.device)
    blended = torch.bmm(matrix, flat).add_((contrast * mean)[:, None, None])
    torch.clamp(blended, 0.0, 1.0, out=flat)


def shift_hue_(pixels: Float[Tensor, "b 3 h w"], turns: Float[Tensor, " b"]) -> None:
    """Shift each image's hue by a share of a full turn, in place; exactly HSV's rotation.

    With v and m the largest and smallest channel and d = v - m, hue measured from cyan in sixths
    of a turn is sign(b - g) (2 + (r - g - b + m) / d): the usual three cases in one line.
    """
    if not len(pixels):
        return
    red, green, blue = pixels.unbind(1)
    low = torch.minimum(red, green)
    torch.minimum(low, blue, out=low)
    chroma = torch.maximum(red, green)
    torch.maximum(chroma, blue, out=chroma).sub_(low)
    hue = (red - green).sub_(blue).add_(low).div_(chroma.clamp(min=1e-12)).add_(2.0)
    hue.copysign_(blue - green).add_(6.0 * turns[:, None, None])
    hue.sub_((hue / 6.0).round_(), alpha=6.0)
    torch.addcmul(low, chroma, hue.abs().sub_(1.0).clamp_(0.0, 1.0), out=red)
    torch.addcmul(low, chroma, (hue + 1.0).abs_().neg_().add_(2.0).clamp_(0.0, 1.0), out=green)
    torch.addcmul(low, chroma, (hue - 1.0).abs_().neg_().add_(2.0).clamp_(0.0, 1.0), out=blue)


def blur_radius(sigma: float, size: int) -> int:
    """Half width of the blur's kernel: three standard deviations, less than the image's side."""
    return min(math.ceil(3 * sigma), size - 1)


def gaussian_blur(
    pixels: Float[Tensor, "b 3 s s"], sigma: Float[Tensor, " b"], radius: int
) -> Float[Tensor, "b 3 s s"]:
    """Blur each image with its own sigma; edges are reflected, as in torchvision."""
    batch, _, size, _ = pixels.shape
    distance = torch.arange(radius + 1, device=pixels.device)
    taps = torch.exp(-0.5 * (distance / sigma[:, None]) ** 2)
    taps /= taps[:, :1] + 2.0 * taps[:, 1:].sum(1, keepdim=True)
    blur = (taps @ reflected_taps(size, radius).to(pixels.device)).view(batch, size, size)
    pixels = pixels.transpose(1, 2).reshape(batch, size, 3 * size)
    pixels = torch.bmm(blur, pixels).view(batch, size * 3, size)
    pixels = torch.bmm(pixels, blur.transpose(1, 2))
    return pixels.view(batch, size, 3, size).transpose(1, 2)


@cache
def reflected_taps(size: int, radius: int) -> Float[Tensor, "taps {size*size}"]:
    """For each distance, the matrix that sums the pixels that far away, reflected at the edges."""
    taps = torch.zeros(radius + 1, size, size)
    row = torch.arange(size)
    for offset in range(-radius, radius + 1):
        column = (row + offset).abs()
        column = torch.where(column >= size, 2 * (size - 1) - column, column)
        taps[abs(offset), row, column] += 1.0
    return taps.view(radius + 1, size * size)


def finish(
    pixels: Float[Tensor, "b 3 s s"],
    grey: Bool[Tensor, " b"],
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Float[Tensor, "b 3 s s"]:
    """Turn the `grey` samples to greyscale and normalise all: one colour matrix per sample.

    It may come after the blur because a colour matrix and a blur of each channel commute.
    """
    device = pixels.device
    inverse = torch.tensor(std, device=device).reciprocal()
    luminance = torch.tensor(LUMINANCE, device=device)
    matrix = torch.where(grey[:, None, None], luminance.expand(3, 3), torch.eye(3, device=device))
    matrix = matrix * inverse[:, None]
    offset = -torch.tensor(mean, device=device) * inverse
    out = torch.bmm(matrix, pixels.flatten(2)).add_(offset[:, None])
    return out.view_as(pixels)
