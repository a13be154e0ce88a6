"""FedDebias's VGG11 (Guo et al., ICML 2023, released code).

The convolutions of VGG11, global average pooling and a linear layer.
"""

import dataclasses
from typing import ClassVar

from torch import nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions, scaled_channels
from rayfed.models.split_model import SplitModel

_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # max pooling ends each stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class VGG11Mean(ModelOptions):
    """3x3 convolutions with ReLU, without batch norm. 9.2 million parameters; the representation has 512 values."""

    name: ClassVar[str] = "vgg11_mean"
    width: float = option(1.0, above=0, help="multiplier of the channels of all convolutions")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape, minimum=32)
        layers: list[nn.Module] = []
        for stage in _STAGES:
            for size in (scaled_channels(size, self.width) for size in stage):
                convolution = nn.Conv2d(channels, size, 3, padding=1)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]  # it has one
                layers += [convolution, nn.ReLU()]
                channels = size
            layers.append(nn.MaxPool2d(2))
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return SplitModel(features, nn.Linear(channels, num_classes), shape)
