"""HarmoFL's images: every one with the amplitudes that all clients have in common, and its own phases."""

from typing import Any, Self

import torch
from torch import Tensor, nn

AMPLITUDE = "harmofl.amplitude"


def amplitude(x: Tensor) -> Tensor:
    """Mean over the batch [batch, channels, height, width] of the amplitudes of the two-dimensional FFT."""
    return torch.fft.fft2(x).abs().mean(0)


def harmonised(x: Tensor, common: Tensor) -> Tensor:
    """`x` with the amplitudes `common` [channels, height, width] and its own phases; as it is while there are none."""
    if not common.numel():
        return x
    return torch.fft.ifft2(torch.polar(common.expand_as(x), torch.fft.fft2(x).angle())).real


class Harmonised(nn.Module):
    """`model` behind `harmonised`; its weights keep their names, the amplitude is one more buffer."""

    model: Any
    harmofl: Any

    def __init__(self, model: Any):
        super().__init__()
        self.__dict__["model"] = model
        self._parameters, self._buffers = model._parameters, model._buffers
        self.feature_shape = tuple(model.feature_shape)
        extra = nn.Module()
        extra.register_buffer("amplitude", torch.zeros(0))  # its shape is known after the setup
        self._modules.update({**model._modules, "harmofl": extra})

    def train(self, mode: bool = True) -> Self:
        self.model.training = mode
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        return self.model.features(harmonised(x, self.harmofl.amplitude))

    def head(self, features: Tensor) -> Tensor:
        return self.model.head(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
