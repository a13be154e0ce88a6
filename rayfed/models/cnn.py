"""Convolutional networks of federated-learning papers, each with the paper and code that it follows."""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.models.base import ModelOptions, hidden_layer, scaled_channels
from rayfed.models.split_model import SplitModel, dry_run, split_after

_CNN_SPLITS = {"conv1": "pool1", "conv2": "pool2", "fc1": "relu3"}  # the split is after activation and pooling


def _convolutions(channels: Sequence[int], *, kernel: Any, pool: Any, padding: int = 0) -> OrderedDict[str, nn.Module]:
    """Return named convolutions between consecutive `channels`, each with ReLU and max pooling, then `flatten`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (inputs, outputs) in enumerate(itertools.pairwise(channels), 1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel, padding=padding)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(pool)
    layers["flatten"] = nn.Flatten()
    return layers


def _flat_width(layers: OrderedDict[str, nn.Module], shape: tuple[int, ...]) -> int:
    """Return how many values the last of `layers`, which flattens, has for an input of `shape`."""
    outputs = dry_run(nn.Sequential(layers), torch.zeros(1, *shape))
    return outputs.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CNN(ModelOptions):
    """conv5x5(32) + ReLU + pool2, conv5x5(64) + ReLU + pool2, FC 512 + ReLU, FC C; no padding.

    The CNN of FedAvg (McMahan et al., AISTATS 2017) as used by DBE (Zhang et al., NeurIPS 2023).
    582,026 parameters for 1x28x28 and 10 classes. Representations for 28x28: conv1 32x12x12, conv2 64x4x4, fc1 512.
    """

    name = "cnn"
    width: float = option(1.0, above=0, help="multiplier of the widths 32, 64 and 512; 0.5 gives 16, 32 and 256")
    split: str = option("fc1", choices=tuple(_CNN_SPLITS), help="layer whose output is the representation")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape, minimum=16)
        if self.projection is not None and self.split != "fc1":
            raise UsageError(f"model.projection={self.projection}: requires model.split=fc1, got {self.split}")
        first = scaled_channels(32, self.width)
        second = scaled_channels(64, self.width)
        hidden = scaled_channels(512, self.width)
        layers = _convolutions((channels, first, second), kernel=5, pool=2)
        flat = _flat_width(layers, shape)
        layers["fc1"] = nn.Linear(flat, hidden)
        layers["relu3"] = nn.ReLU()
        layers["fc2"] = nn.Linear(hidden, num_classes)
        return split_after(layers, _CNN_SPLITS[self.split], shape)


class RotatedCNN(ModelOptions):
    """conv5x5(16) + ReLU + pool2, conv5x5(32) + ReLU + pool2, padding 2, one linear layer.

    The CNN for rotated digits of de Luca et al. 2022 (domain generalisation by augmentation), from its released code.
    28,938 parameters for 1x28x28 and 10 classes. The representation has 1568 values.
    """

    name = "cnn_rotated"

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, height, width = self.image_shape(shape, minimum=4)
        layers = _convolutions((channels, 16, 32), kernel=5, pool=2, padding=2)
        features = nn.Sequential(*layers.values())
        flat = 32 * (height // 4) * (width // 4)
        return SplitModel(features, nn.Linear(flat, num_classes), shape)


class DomainBedCNN(ModelOptions):
    """Four 3x3 convolutions (64, 128 with stride 2, 128, 128), each with ReLU and GroupNorm(8), global average pooling.

    DomainBed's CNN for MNIST (Gulrajani and Lopez-Paz, ICLR 2021), which FedDebias (Guo et al., ICML 2023) uses. The
    representation has 128 values. Images of any size are allowed.
    """

    name = "cnn_domainbed"

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape)
        layers: list[nn.Module] = []
        for size, stride in ((64, 1), (128, 2), (128, 1), (128, 1)):
            layers.append(nn.Conv2d(channels, size, 3, stride, padding=1))
            layers.append(nn.ReLU())
            layers.append(nn.GroupNorm(8, size))
            channels = size
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return SplitModel(features, nn.Linear(128, num_classes), shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsCNN(ModelOptions):
    """Three 5x5 convolutions (64, 64, 128) with pooling after the first two, then FC 2048, FC 512, FC C.

    FedBN's CNN for Digits-5 (Li et al., ICLR 2021), also used by ADCOL and, with different pooling, by FRAug. Every
    layer except the last is followed by batch norm and ReLU. For 10 classes there are 14,219,210 parameters with
    3x28x28 (FedBN) and 18,151,370 with 3x32x32 (FRAug, pool=3). The representation has 512 values, the inputs of the
    last layer.
    """

    name = "digits_cnn"
    width: float = option(1.0, above=0, help="multiplier of all layer widths; 0.25 suits a small CPU")
    pool: int = option(
        2, choices=(2, 3), help="size of the max pooling: 2 as in FedBN, or 3 with padding 1 as in FRAug"
    )

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape, minimum=4)
        sizes = [scaled_channels(size, self.width) for size in (64, 64, 128)]
        first = scaled_channels(2048, self.width)
        second = scaled_channels(512, self.width)
        layers: list[nn.Module] = []
        for index, size in enumerate(sizes):
            layers.append(nn.Conv2d(channels, size, 5, padding=2))
            layers += [nn.BatchNorm2d(size), nn.ReLU()]
            if index < 2:
                layers.append(self.pooling())
            channels = size
        layers.append(nn.Flatten())
        convolutions = SplitModel(nn.Sequential(*layers), nn.Identity(), shape)
        (flat,) = convolutions.feature_shape
        layers += hidden_layer(flat, first)
        layers += hidden_layer(first, second)
        return SplitModel(nn.Sequential(*layers), nn.Linear(second, num_classes), shape)

    def pooling(self) -> nn.Module:
        """Return the max pooling of either paper."""
        if self.pool == 2:
            return nn.MaxPool2d(2)
        return nn.MaxPool2d(3, stride=2, padding=1)


_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # max pooling ends each stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class VGG11Mean(ModelOptions):
    """The convolutions of VGG11 with ReLU, without batch norm, global average pooling and a linear layer.

    The network of FedDebias's released code (Guo et al., ICML 2023). 9.2 million parameters; the representation has 512
    values.
    """

    name = "vgg11_mean"
    width: float = option(1.0, above=0, help="multiplier of the channels of all convolutions")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape, minimum=32)
        layers: list[nn.Module] = []
        for stage in _STAGES:
            for full_size in stage:
                size = scaled_channels(full_size, self.width)
                convolution = nn.Conv2d(channels, size, 3, padding=1)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]  # it has one
                layers += [convolution, nn.ReLU()]
                channels = size
            layers.append(nn.MaxPool2d(2))
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return SplitModel(features, nn.Linear(channels, num_classes), shape)


_HAR_SPLITS = {"conv2": "flatten", "fc1": "relu3", "fc2": "relu4"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HARCNN(ModelOptions):
    """conv1x9(32) + ReLU + pool1x2, conv1x9(64) + ReLU + pool1x2, FC 1024 + ReLU, FC 512 + ReLU, FC C; no padding.

    The CNN for UCI HAR (Zeng et al., MobiCASE 2014) as used by DBE (Zhang et al., NeurIPS 2023). Inputs are channels x
    1 x time. 2,253,958 parameters for 9x1x128 and 6 classes. The split is before all fully connected layers (1664
    values), as in DBE's code; the paper says before the last one, which is `split=fc2`.
    """

    name = "har_cnn"
    split: str = option("conv2", choices=tuple(_HAR_SPLITS), help="layer whose output is the representation")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        fits = len(shape) == 3 and shape[1] == 1 and shape[2] >= 28
        self.require(fits, "sensor signals (channels x 1 x time) with at least 28 time steps", shape)
        channels, _, _ = shape
        layers = _convolutions((channels, 32, 64), kernel=(1, 9), pool=(1, 2))
        flat = _flat_width(layers, shape)
        layers["fc1"] = nn.Linear(flat, 1024)
        layers["relu3"] = nn.ReLU()
        layers["fc2"] = nn.Linear(1024, 512)
        layers["relu4"] = nn.ReLU()
        layers["fc3"] = nn.Linear(512, num_classes)
        return split_after(layers, _HAR_SPLITS[self.split], shape)
