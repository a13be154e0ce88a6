"""What every model's options share."""

import abc
import dataclasses
from typing import ClassVar

from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.models.projection import with_projection
from rayfed.models.split_model import SplitModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(abc.ABC):
    """Options of one family of models; `build` makes a freshly initialised network.

    Weights are drawn from torch's global generator, so a caller that wants them repeatable seeds it first.
    """

    name: ClassVar[str]
    projection: int | None = option(
        None, low=1, help="width of ADCOL's projection in front of the split (2048 in the paper); null: none"
    )

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """A `SplitModel` for inputs of `shape`, one sample's (C, H, W) for images, and `num_classes` classes.

        Raises:
            UsageError: inputs of this shape do not fit.
        """
        model = self.network(tuple(shape), num_classes)
        return model if self.projection is None else with_projection(model, self.projection, num_classes)

    @abc.abstractmethod
    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        """The network without a projection."""

    def image_shape(self, shape: tuple[int, ...], *, minimum: int = 1) -> tuple[int, int, int]:
        """`shape` as (channels, height, width), held against the smallest side that the network can take."""
        text = "x".join(str(size) for size in shape)
        if len(shape) != 3:
            raise UsageError(f"model.name={self.name}: takes images (channels x height x width), got samples of {text}")
        channels, height, width = shape
        if min(height, width) < minimum:
            raise UsageError(f"model.name={self.name}: images of {text} are too small, it needs {minimum}x{minimum}")
        return channels, height, width


def scaled_channels(channels: int, width: float) -> int:
    """A layer's number of channels under the width multiplier, at least one."""
    return max(1, round(channels * width))
