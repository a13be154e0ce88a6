"""The weak and the moderate augmentation scheme of de Luca et al. 2022, section 4, for photographs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rayfed.augment.base import ImageAugment
from rayfed.augment.colour_jitter import jitter_colours, random_grey
from rayfed.augment.geometry import crop_and_resize, draw_boxes, random_flip
from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class Weak(ImageAugment):
    """Random flip, then a random crop (0.7 to 1 of the area, aspect ratio 3:4 to 4:3) resized to the image size."""

    flip: float = option(0.5, low=0, high=1, help="probability of a left-right flip")
    scale: float = option(0.7, above=0, high=1, help="minimum fraction of the area that a crop keeps; 1 for no crop")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        if self.scale == 1:
            return x
        return crop_and_resize(x, draw_boxes(len(x), x.shape[2], x.shape[3], (self.scale, 1.0), x.device))


@dataclass(frozen=True, kw_only=True)
class Moderate(Weak):
    """The weak scheme, then jitter of brightness, contrast, saturation and hue, then grey with probability 0.1."""

    jitter: float = option(
        0.3, low=0, high=0.5, help="strength of the jitter of brightness, contrast, saturation and hue"
    )
    grey: float = option(0.1, low=0, high=1, help="probability of turning an image grey")

    def check(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        super().check(shape, dtype)
        if shape[0] not in (1, 3) or dtype != np.uint8:
            raise UsageError("augment.name=moderate: colour jitter needs uint8 images with 1 or 3 channels")

    def __call__(self, x: Tensor) -> Tensor:
        x = super().__call__(x)
        x = jitter_colours(x, self.jitter) if self.jitter else x
        return random_grey(x, self.grey) if self.grey else x
