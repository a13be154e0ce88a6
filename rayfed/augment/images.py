"""Augmentations of images: rotation, flips, crops, blur and colours, drawn anew for every image.

torchvision's transforms draw once per call, and 64 calls for images of 28 x 28 take 20 times as long as the single
`grid_sample` here (1 CPU thread). The results agree with torchvision's (tested). Colours are changed on floats in
[0, 1]; grey images (one channel) have neither saturation nor hue, so these two changes leave them as they are.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.augment.base import ImageAugment
from rayfed.core.errors import UsageError
from rayfed.core.options import option


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    """Draw [count] values from U[low, high)."""
    return torch.empty(count, device=device).uniform_(low, high)


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate each image counter-clockwise about its centre by its own angle; nearest pixel, zero outside."""
    height, width = x.shape[-2:]
    angle = torch.deg2rad(degrees).view(-1, 1, 1)
    down, right = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (height, width))
    # Rows count downwards, so a counter-clockwise rotation of the image looks pixels up clockwise, with this sign.
    column = torch.cos(angle) * right - torch.sin(angle) * down[:, None]
    row = torch.sin(angle) * right + torch.cos(angle) * down[:, None]
    grid = torch.stack([column * (2 / width), row * (2 / height)], -1)
    return F.grid_sample(x, grid.to(x.dtype), mode="nearest", padding_mode="zeros", align_corners=False)


def draw_chances(x: Tensor, probability: float = 1.0) -> tuple[Tensor, ...]:
    """Draw a number from U[0, 1) for each image, [batch, 1, 1, 1]; nothing if the probability is 0."""
    return (torch.rand(len(x), 1, 1, 1, device=x.device),) if probability else ()


def flip_below(x: Tensor, probability: float, chances: Tensor) -> Tensor:
    """Mirror left to right each image whose chance is below `probability`."""
    return torch.where(chances < probability, x.flip(-1), x)


@dataclass(frozen=True, kw_only=True)
class Rotation(ImageAugment):
    """Rotate by an angle drawn from U[−degrees, degrees]; nearest pixel, zero outside (de Luca et al. 2022, rot-α)."""

    degrees: float = option(45.0, low=0, high=180, help="α, the largest angle; 15, 30, 45 or 60 in the paper")
    flip: float = option(0.0, low=0, high=1, help="probability of a left-right flip before the rotation")

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        return *draw_chances(x, self.flip), uniform(len(x), -self.degrees, self.degrees, x.device)

    def apply(self, x: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        *chances, degrees = drawn
        return rotate(flip_below(x, self.flip, *chances) if chances else x, degrees)


@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(ImageAugment):
    """Flip left to right."""

    probability: float = option(0.5, low=0, high=1, help="probability of a left-right flip")

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        return draw_chances(x)

    def apply(self, x: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        return flip_below(x, self.probability, *drawn)


@dataclass(frozen=True, kw_only=True)
class Crop(ImageAugment):
    """Random flip, zero padding and a random crop of the original size, as is usual for CIFAR."""

    padding: int = option(4, low=1, help="zero padding on each side, in pixels")
    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        return *draw_chances(x, self.flip), torch.randint(2 * self.padding + 1, (2, len(x)), device=x.device).T

    def apply(self, x: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        *chances, corners = drawn  # row and column of each image
        x = flip_below(x, self.flip, *chances) if chances else x
        count, channels, height, width = x.shape
        rows = corners[:, :1] + torch.arange(height, device=x.device)
        columns = corners[:, 1:] + torch.arange(width, device=x.device)
        places = rows[:, :, None] * (width + 2 * self.padding) + columns[:, None]  # in the rows of the padded image
        places = places.view(count, 1, -1).expand(-1, channels, -1)
        return F.pad(x, [self.padding] * 4).flatten(2).gather(2, places).view(x.shape)


def draw_boxes(count: int, scale: tuple[float, float], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ten boxes for each image: fractions of the area within `scale` and logarithms of aspect ratios from 3:4 to
    4:3, both [count, 10], and one position in [0, 1), [count, 2].
    """
    shares = torch.empty(10, count, device=device).uniform_(*scale)
    ratios = torch.empty(10, count, device=device).uniform_(math.log(3 / 4), math.log(4 / 3))
    return shares.T, ratios.T, torch.rand(2, count, device=device).T


def first_that_fits(height: int, width: int, shares: Tensor, ratios: Tensor, positions: Tensor) -> Tensor:
    """Return top, left, height and width, [4, count], of the first box of `draw_boxes` that fits into each image.

    If none of the ten fits, the box is the whole image, as in torchvision.
    """
    areas, ratios = height * width * shares, ratios.exp()
    wide, high = (areas * ratios).sqrt().round(), (areas / ratios).sqrt().round()
    fits = (wide > 0) & (wide <= width) & (high > 0) & (high <= height)
    first = fits.int().argmax(1, keepdim=True)
    any_fits = fits.any(1)
    wide = torch.where(any_fits, wide.gather(1, first)[:, 0], width)
    high = torch.where(any_fits, high.gather(1, first)[:, 0], height)
    top, left = (positions.T * torch.stack([height - high + 1, width - wide + 1])).floor()
    return torch.stack([top, left, high, wide])


def crop_and_resize(x: Tensor, boxes: Tensor) -> Tensor:
    """Crop each image to its box and resize it to the image size; bilinear, using only pixels inside the box."""

    def source_positions(start: Tensor, length: Tensor, side: int) -> Tensor:
        start, length = start[:, None], length[:, None]
        inside = (torch.arange(side, device=x.device) + 0.5) * (length / side) - 0.5
        return start + torch.minimum(inside.clamp(min=0), length - 1)

    height, width = x.shape[-2:]
    row = (2 * source_positions(boxes[0], boxes[2], height) + 1) / height - 1
    column = (2 * source_positions(boxes[1], boxes[3], width) + 1) / width - 1
    shape = (len(x), height, width)
    grid = torch.stack([column[:, None, :].expand(shape), row[:, :, None].expand(shape)], -1)
    return F.grid_sample(x, grid.to(x.dtype), mode="bilinear", padding_mode="border", align_corners=False)


SIZE = 5


def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image of `x` by a 5 x 5 Gaussian with its own `sigma` [batch]; edges are reflected."""
    count, channels, height, width = x.shape
    offsets = torch.arange(SIZE, device=x.device) - SIZE // 2
    weights = torch.exp(-0.5 * (offsets / sigma[:, None]).square())
    weights = (weights / weights.sum(1, keepdim=True)).repeat_interleave(channels, 0).to(x.dtype)
    flat = F.pad(x, [SIZE // 2] * 4, mode="reflect").reshape(1, count * channels, height + SIZE - 1, width + SIZE - 1)
    flat = F.conv2d(flat, weights[:, None, None, :], groups=count * channels)
    return F.conv2d(flat, weights[:, None, :, None], groups=count * channels).reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class Blur(ImageAugment):
    """Blur by a 5 x 5 Gaussian with σ drawn from U[low, high] (de Luca et al. 2022)."""

    low: float = option(0.1, above=0, help="minimum of σ, in pixels")
    high: float = option(2.0, above=0, help="maximum of σ, in pixels")

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        return (uniform(len(x), self.low, self.high, x.device),)

    def apply(self, x: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        return gaussian_blur(x, *drawn)


RED, GREEN, BLUE = 0.2989, 0.587, 0.114  # weights in the luminance; as a tensor, they would have to be copied to a GPU


def to_grey(x: Tensor) -> Tensor:
    """Return the luminance [batch, 1, height, width]."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return red.mul(RED).add_(green * GREEN).add_(blue * BLUE).unsqueeze(1)


def blend(x: Tensor, other: Tensor | float, weight: Tensor) -> Tensor:
    """Return weight·x + (1 − weight)·other, clamped to [0, 1]; a weight above 1 extrapolates away from `other`."""
    weight = weight.view(-1, 1, 1, 1)
    return (weight * x + (1 - weight) * other).clamp(0, 1)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with black by its own `factor` [batch]."""
    return blend(x, 0.0, factor)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its mean luminance by its own `factor` [batch]."""
    return blend(x, to_grey(x).mean((1, 2, 3), keepdim=True), factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its luminance by its own `factor` [batch]."""
    return x if x.shape[1] == 1 else blend(x, to_grey(x), factor)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of each image by `shift` [batch] of the colour circle, keeping saturation and value (HSV)."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    value, chroma = x.amax(1), x.amax(1) - x.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(  # the hue in sixths of the circle
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * shift.view(-1, 1, 1)

    def channel(offset: float) -> Tensor:
        position = (offset + hue) % 6
        return value - chroma * torch.minimum(position, 4 - position).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)


def draw_jitter(x: Tensor, strength: float) -> tuple[Tensor, ...]:
    """Draw numbers for `jitter_colours`: four for the order, [batch, 4], then three factors and a shift, each [batch].

    With s = `strength`, the factors are drawn from U[1 − s, 1 + s], the shift from U[−s, s].
    """
    count, low = len(x), max(0.0, 1 - strength)
    order = torch.rand(count, 4)  # on the CPU, where the groups of images are formed
    factors = [uniform(count, low, 1 + strength, x.device) for _ in range(3)]
    return order, *factors, uniform(count, -strength, strength, x.device)


def jitter_colours(x: Tensor, order: Tensor, *factors: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image, in the order of its four numbers in `order`."""
    orders = order.argsort(1)
    kinds = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    sizes = [orders[:, position].bincount(minlength=len(kinds)).tolist() for position in range(len(kinds))]
    grouped = orders.argsort(dim=0, stable=True).to(x.device, non_blocking=True)  # one copy: each may wait for the GPU
    x = x.clone()
    for position in range(len(kinds)):
        groups = grouped[:, position].split(sizes[position])
        for adjust, factor, rows in zip(kinds, factors, groups, strict=True):
            if len(rows):
                x[rows] = adjust(x[rows], factor[rows])
    return x


def grey_below(x: Tensor, probability: float, chances: Tensor) -> Tensor:
    """Remove the colours of each image whose chance is below `probability`."""
    return torch.where(chances < probability, to_grey(x).expand_as(x), x)


@dataclass(frozen=True, kw_only=True)
class Weak(ImageAugment):
    """Random flip, then a random crop (0.7 to 1 of the area, aspect ratio 3:4 to 4:3) resized to the image size."""

    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")
    scale: float = option(0.7, above=0, high=1, help="minimum fraction of the area that a crop keeps; 1 for no crop")

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        drawn = draw_chances(x, self.flip)
        return drawn if self.scale == 1 else (*drawn, *draw_boxes(len(x), (self.scale, 1.0), x.device))

    def apply(self, x: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        if self.flip:
            x, drawn = flip_below(x, self.flip, drawn[0]), drawn[1:]
        return x if self.scale == 1 else crop_and_resize(x, first_that_fits(*x.shape[2:], *drawn[:3]))


@dataclass(frozen=True, kw_only=True)
class Moderate(Weak):
    """The weak scheme, then jitter of brightness, contrast, saturation and hue, then grey with probability 0.1."""

    jitter: float = option(
        0.3, low=0, high=0.5, help="strength of the jitter of brightness, contrast, saturation and hue"
    )
    grey: float = option(0.1, low=0, high=1, help="probability of turning an image grey")

    def check(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        super().check(shape, dtype)
        if shape[0] not in (1, 3) or dtype != np.uint8:
            raise UsageError("augment.name=moderate: colour jitter needs uint8 images with 1 or 3 channels")

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        drawn = super().draw(x)
        drawn += draw_jitter(x, self.jitter) if self.jitter else ()
        return drawn + draw_chances(x, self.grey)

    def apply(self, x: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        x = super().apply(x, drawn)  # by the first numbers
        jitter = drawn[-6:-1] if self.grey else drawn[-5:]
        x = jitter_colours(x, *jitter) if self.jitter else x
        return grey_below(x, self.grey, drawn[-1]) if self.grey else x
