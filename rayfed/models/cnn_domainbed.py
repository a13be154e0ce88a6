"""DomainBed's CNN for MNIST (Gulrajani and Lopez-Paz, ICLR 2021), which FedDebias (Guo et al., ICML 2023) uses."""

import dataclasses
from typing import ClassVar

from torch import nn

from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class DomainBedCNN(ModelOptions):
    """Four 3x3 convolutions (64, 128 with stride 2, 128, 128), each with ReLU and GroupNorm(8), global average pooling.

    The representation has 128 values. Images of any size are allowed.
    """

    name: ClassVar[str] = "cnn_domainbed"

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape)
        layers: list[nn.Module] = []
        for size, stride in ((64, 1), (128, 2), (128, 1), (128, 1)):
            layers += [nn.Conv2d(channels, size, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(8, size)]
            channels = size
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return SplitModel(features, nn.Linear(128, num_classes), shape)
