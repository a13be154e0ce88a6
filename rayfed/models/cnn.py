"""The four-layer CNN of FedAvg (McMahan et al., AISTATS 2017) as used by DBE (Zhang et al., NeurIPS 2023)."""

import dataclasses
from collections import OrderedDict
from typing import ClassVar

import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.models.base import ModelOptions, scaled_channels
from rayfed.models.split_model import SplitModel, dry_run, split_after

_LAST_LAYERS = {"conv1": "pool1", "conv2": "pool2", "fc1": "relu3"}  # the split is after activation and pooling


@dataclasses.dataclass(frozen=True, kw_only=True)
class CNN(ModelOptions):
    """conv5x5(32) + ReLU + pool2, conv5x5(64) + ReLU + pool2, FC 512 + ReLU, FC C; no padding.

    582,026 parameters for 1x28x28 and 10 classes. Representations for 28x28: conv1 32x12x12, conv2 64x4x4, fc1 512.
    """

    name: ClassVar[str] = "cnn"
    width: float = option(1.0, above=0, help="multiplier of the widths 32, 64 and 512; 0.5 gives 16, 32 and 256")
    split: str = option("fc1", choices=tuple(_LAST_LAYERS), help="layer whose output is the representation")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        channels, _, _ = self.image_shape(shape, minimum=16)
        if self.projection is not None and self.split != "fc1":
            raise UsageError(f"model.projection={self.projection}: requires model.split=fc1, got {self.split}")
        first, second, hidden = (scaled_channels(size, self.width) for size in (32, 64, 512))
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(channels, first, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(first, second, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
        )
        flat = dry_run(nn.Sequential(layers), torch.zeros(1, *shape)).shape[1]
        layers.update(fc1=nn.Linear(flat, hidden), relu3=nn.ReLU(), fc2=nn.Linear(hidden, num_classes))
        return split_after(layers, _LAST_LAYERS[self.split], shape)
