"""Random brightness, contrast, saturation, hue and grey for every image. Images are floats in [0, 1].

The results agree with torchvision's (tested). Grey images (one channel) have neither saturation nor hue, so these
changes leave them as they are.
"""

import torch
from torch import Tensor

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
    factors = [torch.empty(count, device=x.device).uniform_(low, 1 + strength) for _ in range(3)]
    factors.append(torch.empty(count, device=x.device).uniform_(-strength, strength))
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
