"""Interface of augmentations: random changes of training batches, drawn anew for every example of every batch.

An augmentation is applied to a whole batch on its device and draws from torch's global generator. The engine seeds the
generator for each batch by seed, round, client and step. So the result does not depend on where a client trains, or
with which others. Where clients train at once, `draw` runs for each, and `apply` once for all.

Only training examples are augmented: the batches of local training, and what an algorithm reads from `data.as_trained`
(the losses by which AFL and VM weight clients). All other computations on a client's data, and all scores, use the data
without augmentation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.core.options import option

Drawn = tuple[Tensor, ...]
"""The random numbers that an augmentation draws for a batch: tensors [batch, ...]."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Base class of all augmentations. A user's own augmentation derives from it and declares its options as fields.

    It defines `draw` and `apply`, or `__call__` alone, which is then called for each client's batch. It receives uint8
    images as floats in [0, 1], or normalised if `after_normalisation` is set, and other inputs unchanged.
    """

    after_normalisation: ClassVar[bool] = False

    def check(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Raise a `UsageError` if stored inputs of `shape` and `dtype` cannot be augmented."""

    def draw(self, x: Tensor) -> Drawn:
        """Draw the random numbers for `x` [batch, *shape]: tensors [batch, ...], whatever the values of `x`."""
        raise NotImplementedError

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """Augment each example of `x` [batch, *shape] by its own numbers in `drawn`. `x` may be modified in place."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """Augment `x` [batch, *shape]. It may be modified in place."""
        return self.apply(x, self.draw(x))

    @property
    def draws_apart(self) -> bool:
        """Whether `draw` and `apply` are all that the augmentation does."""
        return type(self).__call__ is Augment.__call__

    def together(self, x: Tensor, seeds: Sequence[Callable[[], None]]) -> Tensor:
        """Augment `x`, the batches of several clients one behind the other; each client draws after its seed."""
        of_clients = []
        for seed, own in zip(seeds, x.chunk(len(seeds)), strict=True):
            seed()
            numbers = self.draw(own)
            of_clients.append(numbers)
        drawn = [torch.cat(each) for each in zip(*of_clients, strict=True)]
        return self.apply(x, tuple(drawn))


class NoAugment(Augment):
    """No augmentation."""


class ImageAugment(Augment):
    """An augmentation of images [channels, height, width]."""

    def check(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        if len(shape) != 3:
            sizes = "x".join(map(str, shape)) or "single numbers"
            raise UsageError(f"augment.name: {type(self).__name__} needs images, but the inputs are {sizes}")


@dataclass(frozen=True, kw_only=True)
class Noise(Augment):
    """Add Gaussian noise to normalised inputs of any shape (Chen et al. 2023, FRAug, Table 6)."""

    after_normalisation = True

    sigma: float = option(0.1, low=0, help="standard deviation; 0.01, 0.1 or 1 in the paper")

    def check(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        if dtype != np.uint8 and dtype.kind != "f":
            raise UsageError(f"augment.name=noise: needs images or floats, but the inputs of this data are {dtype}")

    def draw(self, x: Tensor) -> Drawn:
        noise = torch.randn_like(x)
        return (noise,)

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        (noise,) = drawn
        return noise.mul_(self.sigma).add_(x)
