"""Base class of model options, and ADCOL's projection before the split.

The projection and its predictor: Li, He and Song, "Adversarial Collaborative Learning on Non-IID Features", ICML 2023,
section 5.1. The projection is that of SimSiam.
"""

import abc
import dataclasses
import math
from typing import ClassVar

from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.models.split_model import SplitModel, ensure_split


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(abc.ABC):
    """Options of a family of models. `build` creates a newly initialised network.

    Initial weights are drawn from torch's global generator; seed it first for reproducible weights.
    """

    name: ClassVar[str]
    projection: int | None = option(
        None, low=1, help="width of ADCOL's projection before the split (2048 in the paper); null for no projection"
    )

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Create the network, with its projection if there is one.

        Args:
            shape: Shape of one input; (channels, height, width) for images.

        Raises:
            UsageError: The network cannot take inputs of this shape.
        """
        model = self.network(tuple(shape), num_classes)
        if self.projection is None:
            return model
        return with_projection(ensure_split(model, shape), self.projection, num_classes)

    @abc.abstractmethod
    def network(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Create the network without a projection, and split it if its split is not before its last layer."""

    def image_shape(self, shape: tuple[int, ...], *, minimum: int = 1) -> tuple[int, int, int]:
        """Return `shape`, (channels, height, width), after a check that images have `minimum` pixels on each side."""
        needed = f"images (channels x height x width) of at least {minimum}x{minimum}"
        self.require(len(shape) == 3 and min(shape[1:]) >= minimum, needed, shape)
        channels, height, width = shape
        return channels, height, width

    def require(self, fits: bool, needed: str, shape: tuple[int, ...]) -> None:
        """Raise UsageError unless inputs of `shape` are what the network needs."""
        if not fits:
            got = "x".join(map(str, shape))
            raise UsageError(f"model.name={self.name}: needs {needed}, got inputs of {got}")


def scaled_channels(channels: int, width: float) -> int:
    """Return the number of channels times the width multiplier, at least one."""
    return max(1, round(channels * width))


def with_projection(model: SplitModel, dim: int, num_classes: int) -> SplitModel:
    """Append a projection to `dim` values to the features of `model` and replace its head by a predictor.

    The projection has three linear layers of width `dim` with batch norm and two ReLUs, the predictor one hidden layer
    of 512 with batch norm and ReLU. The split is between them. Feature maps are flattened first. The paper uses dim =
    2048.
    """
    layers: list[nn.Module] = []
    for inputs in (math.prod(model.feature_shape), dim, dim):
        layers += [nn.Linear(inputs, dim), nn.BatchNorm1d(dim), nn.ReLU()]
    features = nn.Sequential(model.features, nn.Flatten(), nn.Sequential(*layers[:-1]))
    hidden = nn.Linear(dim, 512), nn.BatchNorm1d(512), nn.ReLU()
    projected = SplitModel(features, nn.Sequential(*hidden, nn.Linear(512, num_classes)))
    projected.feature_shape = (dim,)
    return projected
