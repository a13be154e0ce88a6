"""Fully connected network. McMahan et al. (AISTATS 2017) use two hidden layers of 200 units for MNIST ("2NN")."""

import dataclasses
import math

from torch import nn

from rayfed.core.options import option
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(ModelOptions):
    """Flattened inputs, hidden layers with ReLU, one linear layer. The representation is the last hidden layer."""

    name = "mlp"
    hidden: list[int] = option([200, 200], low=1, help="widths of the hidden layers; [] for a linear model")
    batch_norm: bool = option(False, help="use batch norm between each hidden layer and its ReLU")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        layers: list[nn.Module] = [nn.Flatten()]
        size = math.prod(shape)
        for width in self.hidden:
            layers.append(nn.Linear(size, width))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(nn.ReLU())
            size = width
        return SplitModel(nn.Sequential(*layers), nn.Linear(size, num_classes), shape)
