"""The CNN for UCI HAR (Zeng et al., MobiCASE 2014) as used by DBE (Zhang et al., NeurIPS 2023)."""

import dataclasses
from collections import OrderedDict
from typing import ClassVar

import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel, dry_run, split_after

_LAST_LAYERS = {"conv2": "flatten", "fc1": "relu3", "fc2": "relu4"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HARCNN(ModelOptions):
    """conv1x9(32) + ReLU + pool1x2, conv1x9(64) + ReLU + pool1x2, FC 1024 + ReLU, FC 512 + ReLU, FC C; no padding.

    Inputs are channels x 1 x time. 2,253,958 parameters for 9x1x128 and 6 classes. The split is before all fully
    connected layers (1664 values), as in DBE's code; the paper says before the last one, which is `split=fc2`.
    """

    name: ClassVar[str] = "har_cnn"
    split: str = option("conv2", choices=tuple(_LAST_LAYERS), help="layer whose output is the representation")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        text = "x".join(str(size) for size in shape)
        if len(shape) != 3 or shape[1] != 1 or shape[2] < 28:
            needed = "sensor signals (channels x 1 x time) with at least 28 time steps"
            raise UsageError(f"model.name=har_cnn: needs {needed}, got inputs of {text}")
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(shape[0], 32, (1, 9)),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d((1, 2)),
            conv2=nn.Conv2d(32, 64, (1, 9)),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d((1, 2)),
            flatten=nn.Flatten(),
        )
        flat = dry_run(nn.Sequential(layers), torch.zeros(1, *shape)).shape[1]
        layers.update(fc1=nn.Linear(flat, 1024), relu3=nn.ReLU(), fc2=nn.Linear(1024, 512), relu4=nn.ReLU())
        layers["fc3"] = nn.Linear(512, num_classes)
        return split_after(layers, _LAST_LAYERS[self.split], shape)
