"""The weak and the moderate scheme of de Luca et al. 2022, section 4, for photographs."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rayfed.augment.base import ImageAugment
from rayfed.augment.colour_jitter import jitter_colours, random_grey
from rayfed.augment.geometry import crop_and_resize, draw_boxes, random_flip
from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class Weak(ImageAugment):
    """Mirrored left to right; a box of 0.7 to 1 of the area, sides 3:4 to 4:3, enlarged to the whole."""

    flip: float = option(0.5, low=0, high=1, help="probability of mirroring left to right")
    scale: float = option(0.7, above=0, high=1, help="least share of the area in the box; 1: no crop")

    def __call__(self, x: Tensor) -> Tensor:
        x = random_flip(x, self.flip) if self.flip else x
        if self.scale == 1:
            return x
        return crop_and_resize(x, draw_boxes(len(x), x.shape[2], x.shape[3], (self.scale, 1.0), x.device))


@dataclass(frozen=True, kw_only=True)
class Moderate(Weak):
    """As weak; then brightness, contrast, saturation and hue jittered by 0.3, and a tenth of the images grey."""

    jitter: float = option(0.3, low=0, high=0.5, help="strength of the jitter of all four")
    grey: float = option(0.1, low=0, high=1, help="probability of losing all colour")

    def check(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().check(shape, dtype)
        if shape[0] not in (1, 3) or dtype != np.uint8:
            raise UsageError("augment.name=moderate: jitters colours, which needs uint8 images of 1 or 3 channels")

    def __call__(self, x: Tensor) -> Tensor:
        x = super().__call__(x)
        x = jitter_colours(x, self.jitter) if self.jitter else x
        return random_grey(x, self.grey) if self.grey else x
