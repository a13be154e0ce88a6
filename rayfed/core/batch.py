"""A batch of examples."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Examples ready for the network.

    Attributes:
        x: Normalised inputs [batch, ...].
        y: Classes [batch], or soft labels [batch, classes].
    """

    x: Tensor
    y: Tensor
