"""Gaussian blur with a random width for every image."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.augment.base import ImageAugment
from rayfed.augment.geometry import uniform
from rayfed.core.options import option

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
