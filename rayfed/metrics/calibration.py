"""Calibration: Guo et al. 2017, "On Calibration of Modern Neural Networks", Eq. 3.

    ECE = Σ_b |B_b| / n · |accuracy(B_b) − confidence(B_b)|

over bins of equal width of the confidence, the greatest softmax probability; a bin holds its upper edge.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.core.options import option
from rayfed.metrics.base import OfPredictions, Value


@dataclass(frozen=True, kw_only=True)
class Ece(OfPredictions):
    """`ece`: the expected calibration error, in [0, 1]."""

    bins: int = option(15, low=1, help="bins of the confidence, of equal width")

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        confidence, guess = logits.double().softmax(1).max(1)
        place = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        gap = (guess == y).double() - confidence
        sums = torch.zeros(self.bins, dtype=torch.float64, device=logits.device).index_add(0, place, gap)
        yield Value("ece", float(sums.abs().sum()) / len(y), len(y))
