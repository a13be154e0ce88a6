"""Expected calibration error: Guo et al. 2017, "On Calibration of Modern Neural Networks", Eq. 3.

    ECE = Σ_b |B_b| / n · |accuracy(B_b) − confidence(B_b)|

over bins B_b of equal width of the confidence, which is the largest softmax probability. A bin includes its upper edge.
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

    higher_is_better = False

    bins: int = option(15, low=1, help="number of equally wide bins of the confidence")

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        confidence, prediction = logits.double().softmax(1).max(1)
        bin_index = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        gap = (prediction == y).double() - confidence
        sums = torch.zeros(self.bins, dtype=torch.float64, device=logits.device).index_add(0, bin_index, gap)
        yield Value("ece", float(sums.abs().sum()) / len(y), len(y))
