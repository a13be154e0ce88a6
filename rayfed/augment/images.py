"""Augmentations of images: rotation, flips, crops, blur and colours, drawn anew for every image.

torchvision's transforms draw once per call. For images of 28 x 28, 64 calls take 20 times as long as the single
`grid_sample` here (1 CPU thread). The results agree with torchvision's (tested). Colours are changed on floats in [0,
1]; grey images (one channel) have neither saturation nor hue, so these two changes leave them as they are.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.augment.base import Drawn, ImageAugment
from rayfed.core.errors import UsageError
from rayfed.core.options import option


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    """Draw [count] values from U[low, high)."""
    return torch.empty(count, device=device).uniform_(low, high)


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate each image counter-clockwise about its centre by its own angle; nearest pixel, zero outside."""
    height, width = x.shape[-2:]
    down = from_centre(height, x.device)[:, None]
    right = from_centre(width, x.device)
    angle = torch.deg2rad(degrees)
    angle = angle.view(-1, 1, 1)
    sine = torch.sin(angle)
    cosine = torch.cos(angle)
    # Rows count downwards, so a counter-clockwise rotation of the image looks pixels up clockwise, with this sign.
    column = cosine * right - sine * down
    row = sine * right + cosine * down
    column = column * (2 / width)
    row = row * (2 / height)
    grid = torch.stack([column, row], -1)
    return F.grid_sample(x, grid.to(x.dtype), mode="nearest", padding_mode="zeros", align_corners=False)


def from_centre(side: int, device: torch.device) -> Tensor:
    """Return the distance of each pixel from the centre of a side, [side]."""
    centre = (side - 1) / 2
    return torch.arange(side, device=device) - centre


def draw_chances(x: Tensor, probability: float = 1.0) -> Drawn:
    """Draw a number from U[0, 1) for each image, [batch, 1, 1, 1]; nothing if the probability is 0."""
    if not probability:
        return ()
    chances = torch.rand(len(x), 1, 1, 1, device=x.device)
    return (chances,)


def flip_below(x: Tensor, probability: float, chances: Tensor) -> Tensor:
    """Mirror each image left to right if its chance is below `probability`."""
    mirrored = x.flip(-1)
    return torch.where(chances < probability, mirrored, x)


@dataclass(frozen=True, kw_only=True)
class Rotation(ImageAugment):
    """Rotate by an angle drawn from U[−degrees, degrees]; nearest pixel, zero outside (de Luca et al. 2022, rot-α)."""

    degrees: float = option(45.0, low=0, high=180, help="α, the largest angle; 15, 30, 45 or 60 in the paper")
    flip: float = option(0.0, low=0, high=1, help="probability of a left-right flip before the rotation")

    def draw(self, x: Tensor) -> Drawn:
        chances = draw_chances(x, self.flip)
        degrees = uniform(len(x), -self.degrees, self.degrees, x.device)
        return *chances, degrees

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        *chances, degrees = drawn
        if chances:
            x = flip_below(x, self.flip, *chances)
        return rotate(x, degrees)


@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(ImageAugment):
    """Flip left to right."""

    probability: float = option(0.5, low=0, high=1, help="probability of a left-right flip")

    def draw(self, x: Tensor) -> Drawn:
        return draw_chances(x)

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        return flip_below(x, self.probability, *drawn)


@dataclass(frozen=True, kw_only=True)
class Crop(ImageAugment):
    """Random flip, zero padding and a random crop of the original size, as is usual for CIFAR."""

    padding: int = option(4, low=1, help="zero padding on each side, in pixels")
    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")

    def draw(self, x: Tensor) -> Drawn:
        chances = draw_chances(x, self.flip)
        places = 2 * self.padding + 1
        corners = torch.randint(places, (2, len(x)), device=x.device)
        return *chances, corners.T

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        *chances, corners = drawn
        if chances:
            x = flip_below(x, self.flip, *chances)
        count, channels, height, width = x.shape
        top, left = corners.T
        down = torch.arange(height, device=x.device)
        across = torch.arange(width, device=x.device)
        rows = top[:, None] + down
        columns = left[:, None] + across
        padded = F.pad(x, [self.padding] * 4)
        places = rows[:, :, None] * padded.shape[3] + columns[:, None]  # in the rows of the padded image
        places = places.view(count, 1, -1)
        places = places.expand(-1, channels, -1)
        pixels = padded.flatten(2)
        cropped = pixels.gather(2, places)
        return cropped.view(x.shape)


def draw_boxes(count: int, scale: tuple[float, float], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ten boxes for each image: shares of the area within `scale`, logarithms of aspect ratios, and one position.

    Ratios are from 3:4 to 4:3 and positions in [0, 1). The shapes are [count, 10] twice, and [count, 2].
    """
    shares = torch.empty(10, count, device=device)
    shares.uniform_(*scale)
    log_ratios = torch.empty(10, count, device=device)
    narrowest = math.log(3 / 4)
    widest = math.log(4 / 3)
    log_ratios.uniform_(narrowest, widest)
    positions = torch.rand(2, count, device=device)
    return shares.T, log_ratios.T, positions.T


def first_that_fits(height: int, width: int, shares: Tensor, log_ratios: Tensor, positions: Tensor) -> Tensor:
    """Return top, left, height and width, [4, count], of the first box of `draw_boxes` that fits into each image.

    If none of the ten fits, the box is the whole image, as in torchvision.
    """
    areas = height * width * shares
    ratios = log_ratios.exp()
    wide = (areas * ratios).sqrt()
    high = (areas / ratios).sqrt()
    wide = wide.round()
    high = high.round()
    fits_across = (wide > 0) & (wide <= width)
    fits_down = (high > 0) & (high <= height)
    fits = fits_across & fits_down
    any_fits = fits.any(1)
    first = fits.int().argmax(1, keepdim=True)
    first_wide = wide.gather(1, first)
    first_high = high.gather(1, first)
    wide = torch.where(any_fits, first_wide[:, 0], width)
    high = torch.where(any_fits, first_high[:, 0], height)
    room_down = height - high + 1
    room_across = width - wide + 1
    down, across = positions.T
    top = (down * room_down).floor()
    left = (across * room_across).floor()
    return torch.stack([top, left, high, wide])


def crop_and_resize(x: Tensor, boxes: Tensor) -> Tensor:
    """Crop each image to its box and resize it to the image size; bilinear, using only pixels inside the box."""
    top, left, high, wide = boxes
    count, _, height, width = x.shape
    shape = (count, height, width)
    row = source_positions(top, high, height)
    column = source_positions(left, wide, width)
    row = row[:, :, None]
    column = column[:, None, :]
    grid = torch.stack([column.expand(shape), row.expand(shape)], -1)
    return F.grid_sample(x, grid.to(x.dtype), mode="bilinear", padding_mode="border", align_corners=False)


def source_positions(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Return where to read a side of an image that is cropped and resized, [count, side], from −1 to 1.

    Each image's box begins at `start` [count] and has the `length` [count].
    """
    start = start[:, None]
    length = length[:, None]
    pixels = torch.arange(side, device=start.device)
    inside = (pixels + 0.5) * (length / side) - 0.5
    inside = inside.clamp(min=0)
    inside = torch.minimum(inside, length - 1)
    position = start + inside
    return (2 * position + 1) / side - 1


SIZE = 5
"""The side of the blur's kernel, in pixels."""


def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image of `x` by a 5 x 5 Gaussian with its own `sigma` [batch]; edges are reflected."""
    count, channels, height, width = x.shape
    half = SIZE // 2
    places = torch.arange(SIZE, device=x.device)
    distances = (places - half) / sigma[:, None]
    weights = torch.exp(-0.5 * distances.square())
    weights = weights / weights.sum(1, keepdim=True)
    weights = weights.repeat_interleave(channels, 0).to(x.dtype)
    across = weights[:, None, None, :]
    down = weights[:, None, :, None]
    groups = count * channels
    padded = F.pad(x, [half] * 4, mode="reflect")
    flat = padded.reshape(1, groups, height + 2 * half, width + 2 * half)
    flat = F.conv2d(flat, across, groups=groups)
    flat = F.conv2d(flat, down, groups=groups)
    return flat.reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class Blur(ImageAugment):
    """Blur by a 5 x 5 Gaussian with σ drawn from U[low, high] (de Luca et al. 2022)."""

    low: float = option(0.1, above=0, help="minimum of σ, in pixels")
    high: float = option(2.0, above=0, help="maximum of σ, in pixels")

    def draw(self, x: Tensor) -> Drawn:
        sigma = uniform(len(x), self.low, self.high, x.device)
        return (sigma,)

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        return gaussian_blur(x, *drawn)


# Weights in the luminance. As a tensor, they would have to be copied to a GPU.
RED = 0.2989
GREEN = 0.587
BLUE = 0.114


def to_grey(x: Tensor) -> Tensor:
    """Return the luminance [batch, 1, height, width]."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    luminance = red.mul(RED)
    luminance.add_(green * GREEN)
    luminance.add_(blue * BLUE)
    return luminance.unsqueeze(1)


def blend(x: Tensor, other: Tensor | float, weight: Tensor) -> Tensor:
    """Return weight·x + (1 − weight)·other, clamped to [0, 1]; a weight above 1 extrapolates away from `other`."""
    weight = weight.view(-1, 1, 1, 1)
    blended = weight * x + (1 - weight) * other
    return blended.clamp(0, 1)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with black by its own `factor` [batch]."""
    return blend(x, 0.0, factor)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its mean luminance by its own `factor` [batch]."""
    grey = to_grey(x)
    mean = grey.mean((1, 2, 3), keepdim=True)
    return blend(x, mean, factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its luminance by its own `factor` [batch]."""
    if x.shape[1] == 1:
        return x
    return blend(x, to_grey(x), factor)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of each image by `shift` [batch] of the colour circle, keeping saturation and value (HSV)."""
    if x.shape[1] == 1:
        return x
    value = x.amax(1)
    chroma = value - x.amin(1)
    shift = shift.view(-1, 1, 1)
    hue = hue_of(x, value, chroma) + 6 * shift

    def channel(offset: float) -> Tensor:
        position = (offset + hue) % 6
        distance = torch.minimum(position, 4 - position)
        return value - chroma * distance.clamp(0, 1)

    red = channel(5)
    green = channel(3)
    blue = channel(1)
    return torch.stack([red, green, blue], 1)


def hue_of(x: Tensor, value: Tensor, chroma: Tensor) -> Tensor:
    """Return the hue [batch, height, width] in sixths of the colour circle."""
    red, green, blue = x.unbind(1)
    divisor = torch.where(chroma > 0, chroma, 1)
    near_red = (green - blue) / divisor
    near_green = 2 + (blue - red) / divisor
    near_blue = 4 + (red - green) / divisor
    elsewhere = torch.where(value == green, near_green, near_blue)
    return torch.where(value == red, near_red, elsewhere)


def draw_jitter(x: Tensor, strength: float) -> Drawn:
    """Draw numbers for `jitter_colours`: four for the order, [batch, 4], then three factors and a shift, each [batch].

    With s = `strength`, the factors are drawn from U[1 − s, 1 + s], the shift from U[−s, s].
    """
    count = len(x)
    lowest = max(0.0, 1 - strength)
    order = torch.rand(count, 4)  # on the CPU, where the groups of images are formed
    brightness = uniform(count, lowest, 1 + strength, x.device)
    contrast = uniform(count, lowest, 1 + strength, x.device)
    saturation = uniform(count, lowest, 1 + strength, x.device)
    shift = uniform(count, -strength, strength, x.device)
    return order, brightness, contrast, saturation, shift


def jitter_colours(x: Tensor, order: Tensor, *factors: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image, in the order of its four numbers in `order`."""
    kinds = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    orders = order.argsort(1)
    grouped = orders.argsort(dim=0, stable=True)
    grouped = grouped.to(x.device, non_blocking=True)  # one copy: each may wait for the GPU
    x = x.clone()
    for position in range(len(kinds)):
        kinds_here = orders[:, position]
        sizes = kinds_here.bincount(minlength=len(kinds))
        groups = grouped[:, position].split(sizes.tolist())
        for adjust, factor, rows in zip(kinds, factors, groups, strict=True):
            if len(rows):
                x[rows] = adjust(x[rows], factor[rows])
    return x


def grey_below(x: Tensor, probability: float, chances: Tensor) -> Tensor:
    """Remove the colours of each image if its chance is below `probability`."""
    grey = to_grey(x).expand_as(x)
    return torch.where(chances < probability, grey, x)


@dataclass(frozen=True, kw_only=True)
class Weak(ImageAugment):
    """Random flip, then a random crop (0.7 to 1 of the area, aspect ratio 3:4 to 4:3) resized to the image size."""

    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")
    scale: float = option(0.7, above=0, high=1, help="minimum fraction of the area that a crop keeps; 1 for no crop")

    def draw(self, x: Tensor) -> Drawn:
        drawn = draw_chances(x, self.flip)
        if self.scale < 1:
            scale = (self.scale, 1.0)
            drawn += draw_boxes(len(x), scale, x.device)
        return drawn

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        return self.apply_first(x, list(drawn))

    def apply_first(self, x: Tensor, drawn: list[Tensor]) -> Tensor:
        """Flip and crop by the first of the numbers `drawn`, which are removed."""
        if self.flip:
            chances = drawn.pop(0)
            x = flip_below(x, self.flip, chances)
        if self.scale < 1:
            height, width = x.shape[2:]
            boxes = first_that_fits(height, width, *drawn[:3])
            x = crop_and_resize(x, boxes)
            del drawn[:3]
        return x


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

    def draw(self, x: Tensor) -> Drawn:
        drawn = super().draw(x)
        if self.jitter:
            drawn += draw_jitter(x, self.jitter)
        drawn += draw_chances(x, self.grey)
        return drawn

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        left = list(drawn)
        x = self.apply_first(x, left)
        if self.jitter:
            x = jitter_colours(x, *left[:5])
            del left[:5]
        if self.grey:
            x = grey_below(x, self.grey, *left)
        return x
