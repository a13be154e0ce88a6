"""Additive noise on the inputs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rayfed.augment.base import Augment
from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class Noise(Augment):
    """Add Gaussian noise to normalised inputs of any shape (Chen et al. 2023, FRAug, Table 6)."""

    after_normalisation: ClassVar[bool] = True

    sigma: float = option(0.1, low=0, help="standard deviation; 0.01, 0.1 or 1 in the paper")

    def check(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        if dtype != np.uint8 and dtype.kind != "f":
            raise UsageError(f"augment.name=noise: needs images or floats, but the inputs of this data are {dtype}")

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.sigma * torch.randn_like(x)
