"""Labelled data made of noise by a random network that is never trained, the same for the same drawing of weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE, CODE, WIDTH = 64, 64, 32


@torch.no_grad()
def virtual_data(shape: tuple[int, ...], classes: int, count: int) -> tuple[Tensor, Tensor]:
    """(x [count, *shape] with mean 0 and standard deviation 1, y [count], the classes in turn); torch's generator.

    Noise and the class's random code go through a linear layer and, for images, two convolutions with upsampling
    before each, so that neighbouring pixels are alike.
    """
    y = torch.arange(count) % classes
    inputs = torch.cat([torch.randn(count, NOISE), 3 * torch.randn(classes, CODE)[y]], 1)
    if len(shape) != 3:
        size = torch.Size(shape).numel()
        x = nn.Sequential(nn.Linear(NOISE + CODE, 128), nn.LeakyReLU(0.2), nn.Linear(128, size))(inputs)
        return _standard(x).view(count, *shape), y
    channels, height, width = shape
    low, middle = ([-(-side // part) for side in (height, width)] for part in (4, 2))
    base, first = nn.Linear(NOISE + CODE, WIDTH * low[0] * low[1]), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    last = nn.Conv2d(WIDTH, channels, 3, padding=1)
    blocks = []
    for some in inputs.split(500):
        x = F.leaky_relu(base(some), 0.2).view(-1, WIDTH, *low)
        x = F.leaky_relu(first(F.interpolate(x, middle, mode="bilinear")), 0.2)
        blocks.append(last(F.interpolate(x, (height, width), mode="bilinear")))
    return _standard(torch.cat(blocks)), y


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()
