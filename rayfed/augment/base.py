"""What an augmentation is: a change of a training batch, drawn anew for every image of every batch.

It works on whole batches, on the device where they lie, and draws from torch's global generator, which the engine seeds
for each batch by seed, round, client and step: the outcome is the same wherever and with whomever a client trains.
Only what is trained on is augmented: the batches of local training, and what a method takes from `data.as_trained`
(the losses by which AFL and VM weigh). What it computes over a client's data besides and all scores see the data as
they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from rayfed.augment import AUGMENTS
from rayfed.core.errors import UsageError
from rayfed.core.options import build
from rayfed.core.registry import resolve


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Base of all augmentations; a user's own derives from it, with its options as fields.

    uint8 images reach it as floats in [0, 1]; with `after_normalisation` after the dataset's normalisation. Any other data
    reach it as they are.
    """

    after_normalisation: ClassVar[bool] = False

    def check(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Raises UsageError where stored inputs of `shape` and `dtype` cannot be augmented."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [batch, *shape] augmented; `x` itself may be changed in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NoAugment(Augment):
    """Training batches as they are."""


@dataclass(frozen=True, kw_only=True)
class ImageAugment(Augment):
    """An augmentation of images [channels, height, width]."""

    def check(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if len(shape) != 3:
            sides = "x".join(map(str, shape)) or "single numbers"
            raise UsageError(f"augment.name: {type(self).__name__} needs images, this data's inputs are {sides}")


def build_augment(name: str, options: dict[str, Any]) -> Augment | None:
    """The augmentation called `name`, or None for "none".

    Raises:
        UsageError: an unknown name, or an option that is unknown, of a wrong type or out of range.
    """
    found = resolve(name, AUGMENTS, where="augment.name")
    if not (isinstance(found, type) and issubclass(found, Augment)):
        raise UsageError(f"augment.name={name}: must be a dataclass that derives from rayfed.augment.base.Augment")
    made = build(found, options, where="augment", also=("name",))
    return None if isinstance(made, NoAugment) else made
