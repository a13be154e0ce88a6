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
            num_classes: Number of classes.

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
        """Check that `shape` is that of an image of at least `minimum` x `minimum` pixels and return it.

        Returns:
            (channels, height, width).
        """
        text = "x".join(str(size) for size in shape)
        if len(shape) != 3 or min(shape[1:]) < minimum:
            needed = f"images (channels x height x width) of at least {minimum}x{minimum}"
            raise UsageError(f"model.name={self.name}: needs {needed}, got inputs of {text}")
        channels, height, width = shape
        return channels, height, width


def scaled_channels(channels: int, width: float) -> int:
    """Return the number of channels times the width multiplier, at least one."""
    return max(1, round(channels * width))


def projection(inputs: int, dim: int) -> nn.Sequential:
    """Create the projection (B, inputs) -> (B, dim): three linear layers of width `dim` with batch norm, two ReLUs."""
    return nn.Sequential(
        *(nn.Linear(inputs, dim), nn.BatchNorm1d(dim), nn.ReLU()),
        *(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU()),
        *(nn.Linear(dim, dim), nn.BatchNorm1d(dim)),
    )


def predictor(dim: int, num_classes: int) -> nn.Sequential:
    """Create the predictor (B, dim) -> logits (B, C): one hidden layer of 512 with batch norm and ReLU."""
    return nn.Sequential(nn.Linear(dim, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, num_classes))


def with_projection(model: SplitModel, dim: int, num_classes: int) -> SplitModel:
    """Append a projection to `dim` values to the features of `model` and replace its head by a predictor.

    The split is after the projection. Feature maps are flattened first. The paper uses dim = 2048.
    """
    features = nn.Sequential(model.features, nn.Flatten(), projection(math.prod(model.feature_shape), dim))
    projected = SplitModel(features, predictor(dim, num_classes))
    projected.feature_shape = (dim,)
    return projected
