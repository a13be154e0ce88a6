"""A small U-Net, which assigns a class to every pixel."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNet(ModelOptions):
    """A U-Net with batch norm (Ronneberger, Fischer and Brox, MICCAI 2015), for images of any size.

    Every level has two 3x3 convolutions with batch norm and ReLU. Levels are joined by 2x2 max pooling on the way down,
    and by nearest-neighbour enlargement and concatenation on the way up. The head is a 1x1 convolution, and the
    representation has `width` channels per pixel. Outputs are (B, classes, height, width). 29,786 parameters for width
    8, depth 2, one channel and two classes.
    """

    name = "unet"
    width: int = option(16, low=1, help="channels of the first level; every level below has twice as many")
    depth: int = option(2, low=1, high=6, help="number of poolings")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape)
        body = _Body(channels, self.width, self.depth)
        return SplitModel(body, nn.Conv2d(self.width, num_classes, 1), shape)


class _Body(nn.Module):
    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        inputs = [channels, *sizes[:-1]]
        self.down = nn.ModuleList(map(_level, inputs, sizes))
        self.up = nn.ModuleList(_level(3 * size, size) for size in sizes[:-1])

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for level in self.down:
            if skipped:
                x = F.max_pool2d(x, 2)
            x = level(x)
            skipped.append(x)
        x = skipped.pop()
        for level in reversed(self.up):
            enlarged = F.interpolate(x, scale_factor=2)
            x = level(torch.cat([skipped.pop(), enlarged], 1))
        return x


def _level(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with batch norm and ReLU."""
    layers: list[nn.Module] = []
    for size in (inputs, outputs):
        layers.append(nn.Conv2d(size, outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
