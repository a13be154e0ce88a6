"""FedBN's CNN for Digits-5 (Li et al., ICLR 2021), also used by ADCOL and, with different pooling, by FRAug."""

import dataclasses
from typing import ClassVar

from torch import nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions, scaled_channels
from rayfed.models.split_model import SplitModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsCNN(ModelOptions):
    """Three 5x5 convolutions (64, 64, 128) with pooling after the first two, then FC 2048, FC 512, FC C.

    Every layer except the last is followed by batch norm and ReLU. For 10 classes there are 14,219,210 parameters with
    3x28x28 (FedBN) and 18,151,370 with 3x32x32 (FRAug, pool=3). The representation has 512 values, the inputs of the
    last layer.
    """

    name: ClassVar[str] = "digits_cnn"
    width: float = option(1.0, above=0, help="multiplier of all layer widths; 0.25 suits a small CPU")
    pool: int = option(
        2, choices=(2, 3), help="size of the max pooling: 2 as in FedBN, or 3 with padding 1 as in FRAug"
    )

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape, minimum=4)
        sizes = [scaled_channels(size, self.width) for size in (64, 64, 128, 2048, 512)]
        layers: list[nn.Module] = []
        for index, size in enumerate(sizes[:3]):
            layers += [nn.Conv2d(channels, size, 5, padding=2), nn.BatchNorm2d(size), nn.ReLU()]
            if index < 2:
                layers.append(nn.MaxPool2d(2) if self.pool == 2 else nn.MaxPool2d(3, stride=2, padding=1))
            channels = size
        layers.append(nn.Flatten())
        flat = SplitModel(nn.Sequential(*layers), nn.Identity(), shape).feature_shape[0]
        for inputs, size in ((flat, sizes[3]), (sizes[3], sizes[4])):
            layers += [nn.Linear(inputs, size), nn.BatchNorm1d(size), nn.ReLU()]
        return SplitModel(nn.Sequential(*layers), nn.Linear(sizes[4], num_classes), shape)
