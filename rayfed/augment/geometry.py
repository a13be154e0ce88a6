"""Turning, mirroring and cropping, every image by its own draw.

torchvision's transforms draw once per call, and a call for each of 64 images of 28 x 28 takes 20 times as long as the
one `grid_sample` here (1 CPU thread). The results are the same; the tests hold them against torchvision's.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.augment.base import ImageAugment
from rayfed.core.options import option


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    """[count] draws of U[low, high)."""
    return torch.empty(count, device=device).uniform_(low, high)


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """`x` turned counter-clockwise about the centre by its own angle: nearest pixel, zero outside."""
    height, width = x.shape[-2:]
    angle = torch.deg2rad(degrees).view(-1, 1, 1)
    down, right = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (height, width))
    # rows count downwards, so turning the picture counter-clockwise looks its pixels up clockwise with this sign
    column = torch.cos(angle) * right - torch.sin(angle) * down[:, None]
    row = torch.sin(angle) * right + torch.cos(angle) * down[:, None]
    grid = torch.stack([column * (2 / width), row * (2 / height)], -1)
    return F.grid_sample(x, grid.to(x.dtype), mode="nearest", padding_mode="zeros", align_corners=False)


def random_flip(x: Tensor, share: float) -> Tensor:
    """`x`, each image mirrored left to right with probability `share`."""
    chosen = torch.rand(len(x), 1, 1, 1, device=x.device) < share
    return torch.where(chosen, x.flip(-1), x)


@dataclass(frozen=True, kw_only=True)
class Rotation(ImageAugment):
    """Turned by an angle of U[-degrees, degrees]; nearest pixel, zero fill (de Luca et al. 2022, rot-α)."""

    degrees: float = option(45.0, low=0, high=180, help="α, greatest angle: 15, 30, 45 or 60 in the paper")
    flip: float = option(0.0, low=0, high=1, help="probability of mirroring left to right beforehand")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        return rotate(x, uniform(len(x), -self.degrees, self.degrees, x.device))


@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(ImageAugment):
    """Mirrored left to right."""

    probability: float = option(0.5, low=0, high=1, help="share of the images")

    def __call__(self, x: Tensor) -> Tensor:
        return random_flip(x, self.probability)


@dataclass(frozen=True, kw_only=True)
class Crop(ImageAugment):
    """Padded with zeros and cropped to its size anywhere in that, then mirrored: the scheme of CIFAR."""

    padding: int = option(4, low=1, help="zeros on each side, in pixels")
    flip: float = option(0.5, low=0, high=1, help="probability of mirroring left to right")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        return crop_at(x, torch.randint(2 * self.padding + 1, (2, len(x)), device=x.device), self.padding)


def crop_at(x: Tensor, corners: Tensor, padding: int) -> Tensor:
    """The window of each image, padded, that begins at its `corners` [2, batch] (row, column)."""
    count, channels, height, width = x.shape
    rows = (corners[0, :, None] + torch.arange(height, device=x.device)).view(count, 1, height, 1)
    columns = (corners[1, :, None] + torch.arange(width, device=x.device)).view(count, 1, 1, width)
    image = torch.arange(count, device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
    return F.pad(x, [padding] * 4)[image, channel, rows, columns]


def draw_boxes(count: int, height: int, width: int, scale: tuple[float, float], device: torch.device) -> Tensor:
    """[4, count] of top, left, height, width: a share of the area in `scale`, sides 3:4 to 4:3, anywhere.

    Ten tries each, as in torchvision; an image that has none that fits keeps all of itself.
    """
    area = height * width * torch.empty(10, count, device=device).uniform_(*scale)
    ratio = torch.empty(10, count, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    wide, high = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (wide > 0) & (wide <= width) & (high > 0) & (high <= height)
    first = fits.int().argmax(0, keepdim=True)
    some = fits.any(0)
    wide = torch.where(some, wide.gather(0, first)[0], width)
    high = torch.where(some, high.gather(0, first)[0], height)
    top, left = (torch.rand(2, count, device=device) * torch.stack([height - high + 1, width - wide + 1])).floor()
    return torch.stack([top, left, high, wide])


def crop_and_resize(x: Tensor, boxes: Tensor) -> Tensor:
    """The box of each image, enlarged to the whole image's size: bilinear, and nothing from outside of the box."""

    def sources(start: Tensor, length: Tensor, side: int) -> Tensor:
        start, length = start[:, None], length[:, None]
        inside = (torch.arange(side, device=x.device) + 0.5) * (length / side) - 0.5
        return start + torch.minimum(inside.clamp(min=0), length - 1)

    height, width = x.shape[-2:]
    row = (2 * sources(boxes[0], boxes[2], height) + 1) / height - 1
    column = (2 * sources(boxes[1], boxes[3], width) + 1) / width - 1
    shape = (len(x), height, width)
    grid = torch.stack([column[:, None, :].expand(shape), row[:, :, None].expand(shape)], -1)
    return F.grid_sample(x, grid.to(x.dtype), mode="bilinear", padding_mode="border", align_corners=False)
