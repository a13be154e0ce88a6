"""Plain MLPs beside the model: discriminators and projectors."""

import itertools
from collections.abc import Sequence

from torch import nn


def mlp(widths: Sequence[int], *, linear: bool = False) -> nn.Sequential:
    """Linear layers from width to width (two or more) with ReLU between them; `linear` leaves the ReLUs out."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    layers.pop()
    return nn.Sequential(*(layer for layer in layers if not linear or isinstance(layer, nn.Linear)))
