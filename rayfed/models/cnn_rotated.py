"""The CNN for rotated digits of de Luca et al. 2022 (domain generalisation by augmentation), from its released code."""

import dataclasses
from typing import ClassVar

from torch import nn

from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedCNN(ModelOptions):
    """conv5x5(16) + ReLU + pool2, conv5x5(32) + ReLU + pool2, padding 2, one linear layer.

    28,938 parameters for 1x28x28 and 10 classes. The representation has 1568 values.
    """

    name: ClassVar[str] = "cnn_rotated"

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, height, width = self.image_shape(shape, minimum=4)
        features = nn.Sequential(
            nn.Conv2d(channels, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        return SplitModel(features, nn.Linear(32 * (height // 4) * (width // 4), num_classes), shape)
