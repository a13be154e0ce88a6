"""Multilayer perceptrons for discriminators and projectors."""

import itertools
from collections.abc import Sequence

from torch import nn


def mlp(widths: Sequence[int], *, linear: bool = False) -> nn.Sequential:
    """Return linear layers of the given widths (two or more) with ReLU between them; `linear` omits the ReLUs."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    layers.pop()
    return nn.Sequential(*(layer for layer in layers if not linear or isinstance(layer, nn.Linear)))
