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


def random_flip(x: Tensor, probability: float) -> Tensor:
    """Mirror each image left to right with the given probability."""
    mask = torch.rand(len(x), 1, 1, 1, device=x.device) < probability
    return torch.where(mask, x.flip(-1), x)


@dataclass(frozen=True, kw_only=True)
class Rotation(ImageAugment):
    """Rotate by an angle drawn from U[−degrees, degrees]; nearest pixel, zero outside (de Luca et al. 2022, rot-α)."""

    degrees: float = option(45.0, low=0, high=180, help="α, the largest angle; 15, 30, 45 or 60 in the paper")
    flip: float = option(0.0, low=0, high=1, help="probability of a left-right flip before the rotation")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        return rotate(x, uniform(len(x), -self.degrees, self.degrees, x.device))


@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(ImageAugment):
    """Flip left to right."""

    probability: float = option(0.5, low=0, high=1, help="probability of a left-right flip")

    def __call__(self, x: Tensor) -> Tensor:
        return random_flip(x, self.probability)


@dataclass(frozen=True, kw_only=True)
class Crop(ImageAugment):
    """Random flip, zero padding and a random crop of the original size, as is usual for CIFAR."""

    padding: int = option(4, low=1, help="zero padding on each side, in pixels")
    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        corners = torch.randint(2 * self.padding + 1, (2, len(x)), device=x.device)  # row and column of each image
        count, channels, height, width = x.shape
        rows = (corners[0, :, None] + torch.arange(height, device=x.device)).view(count, 1, height, 1)
        columns = (corners[1, :, None] + torch.arange(width, device=x.device)).view(count, 1, 1, width)
        image = torch.arange(count, device=x.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
        return F.pad(x, [self.padding] * 4)[image, channel, rows, columns]


def draw_boxes(count: int, height: int, width: int, scale: tuple[float, float], device: torch.device) -> Tensor:
    """Draw random boxes: a fraction of the area within `scale`, an aspect ratio from 3:4 to 4:3, any position.

    As in torchvision there are ten attempts per image; if none fits, the box is the whole image.

    Returns:
        Top, left, height and width, [4, count].
    """
    areas = height * width * torch.empty(10, count, device=device).uniform_(*scale)
    ratios = torch.empty(10, count, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    wide, high = (areas * ratios).sqrt().round(), (areas / ratios).sqrt().round()
    fits = (wide > 0) & (wide <= width) & (high > 0) & (high <= height)
    first = fits.int().argmax(0, keepdim=True)
    any_fits = fits.any(0)
    wide = torch.where(any_fits, wide.gather(0, first)[0], width)
    high = torch.where(any_fits, high.gather(0, first)[0], height)
    top, left = (torch.rand(2, count, device=device) * torch.stack([height - high + 1, width - wide + 1])).floor()
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

    def __call__(self, x: Tensor) -> Tensor:
        return gaussian_blur(x, uniform(len(x), self.low, self.high, x.device))


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


def jitter_colours(x: Tensor, strength: float) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image, in random order.

    With s = `strength`, the factors of the first three are drawn from U[1 − s, 1 + s], the shift of the hue from
    U[−s, s].
    """
    count = len(x)
    orders = torch.rand(count, 4).argsort(1)  # on the CPU, where the groups of images are formed
    kinds = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    sizes = [orders[:, position].bincount(minlength=len(kinds)).tolist() for position in range(len(kinds))]
    grouped = orders.argsort(dim=0, stable=True).to(x.device, non_blocking=True)  # one copy: each may wait for the GPU
    low = max(0.0, 1 - strength)
    factors = [uniform(count, low, 1 + strength, x.device) for _ in range(3)]
    factors.append(uniform(count, -strength, strength, x.device))
    x = x.clone()
    for position in range(len(kinds)):
        groups = grouped[:, position].split(sizes[position])
        for adjust, factor, rows in zip(kinds, factors, groups, strict=True):
            if len(rows):
                x[rows] = adjust(x[rows], factor[rows])
    return x


def random_grey(x: Tensor, probability: float) -> Tensor:
    """Remove the colours of each image with the given probability."""
    mask = torch.rand(len(x), 1, 1, 1, device=x.device) < probability
    return torch.where(mask, to_grey(x).expand_as(x), x)


@dataclass(frozen=True, kw_only=True)
class Weak(ImageAugment):
    """Random flip, then a random crop (0.7 to 1 of the area, aspect ratio 3:4 to 4:3) resized to the image size."""

    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")
    scale: float = option(0.7, above=0, high=1, help="minimum fraction of the area that a crop keeps; 1 for no crop")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        if self.scale == 1:
            return x
        return crop_and_resize(x, draw_boxes(len(x), x.shape[2], x.shape[3], (self.scale, 1.0), x.device))


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

    def __call__(self, x: Tensor) -> Tensor:
        x = super().__call__(x)
        x = jitter_colours(x, self.jitter) if self.jitter else x
        return random_grey(x, self.grey) if self.grey else x
