"""Brightness, contrast, saturation, hue and grey, every image by its own draw; images are floats in [0, 1].

The arithmetic is torchvision's, against which the tests hold it. Grey images (one channel) have neither saturation nor
hue and stay as they are there.
"""

import torch
from torch import Tensor

GREY = (0.2989, 0.587, 0.114)  # luminance of red, green and blue


def to_grey(x: Tensor) -> Tensor:
    """Luminance [batch, 1, height, width]."""
    if x.shape[1] == 1:
        return x
    return (x * torch.tensor(GREY, device=x.device, dtype=x.dtype).view(3, 1, 1)).sum(1, keepdim=True)


def blend(x: Tensor, other: Tensor | float, share: Tensor) -> Tensor:
    """share·x + (1 − share)·other, within [0, 1]; a share over 1 leads away from `other`."""
    share = share.view(-1, 1, 1, 1)
    return (share * x + (1 - share) * other).clamp(0, 1)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, 0.0, factor)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, to_grey(x).mean((1, 2, 3), keepdim=True), factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    return x if x.shape[1] == 1 else blend(x, to_grey(x), factor)


def adjust_hue(x: Tensor, turn: Tensor) -> Tensor:
    """`x` with its hue turned by `turn` [batch] of the circle, saturation and value (of HSV) kept."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    value, spread = x.amax(1), x.amax(1) - x.amin(1)
    safe = torch.where(spread > 0, spread, 1)
    sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = sixth + 6 * turn.view(-1, 1, 1)

    def channel(offset: float) -> Tensor:
        place = (offset + sixth) % 6
        return value - spread * torch.minimum(place, 4 - place).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)


def jitter_colours(x: Tensor, strength: float) -> Tensor:
    """Brightness, contrast and saturation by factors of U[1 − s, 1 + s], hue by U[−s, s], in an order of each image."""
    count = len(x)
    orders = torch.rand(count, 4).argsort(1)  # on the CPU: which image is in which group is needed there
    low = max(0.0, 1 - strength)
    factors = [torch.empty(count, device=x.device).uniform_(low, 1 + strength) for _ in range(3)]
    factors.append(torch.empty(count, device=x.device).uniform_(-strength, strength))
    x = x.clone()
    for place in range(4):
        for kind, change in enumerate((adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)):
            rows = (orders[:, place] == kind).nonzero()[:, 0].to(x.device)
            if len(rows):
                x[rows] = change(x[rows], factors[kind][rows])
    return x


def random_grey(x: Tensor, share: float) -> Tensor:
    """`x`, each image without its colours with probability `share`."""
    chosen = torch.rand(len(x), 1, 1, 1, device=x.device) < share
    return torch.where(chosen, to_grey(x).expand_as(x), x)
