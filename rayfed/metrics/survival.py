"""The metric of survival analysis: whether those at higher risk have the event earlier."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from torch import Tensor

from rayfed.core.outputs import Kind
from rayfed.metrics.base import OfPredictions, Value

_PAIRS = 2**22  # compared at once


class Concordance(OfPredictions):
    """`concordance`: Harrell's index, the share of comparable pairs in which the earlier event has the higher risk.

    A pair is comparable if one patient has the event before the other's event or last visit; a visit at the same time
    counts as later. Equal risks count half. 0.5 is chance. A part without comparable pairs has no value (Harrell et
    al. 1982, "Evaluating the Yield of Medical Tests").
    """

    higher_is_better = True
    kinds: ClassVar[tuple[Kind, ...]] = ("survival",)

    def measure(self, outputs: Tensor, y: Tensor) -> Iterable[Value]:
        risks = outputs.double().cpu().numpy()
        events, times = y.double().cpu().numpy().T
        ordered, pairs = concordant_pairs(risks, events == 1, times)
        if pairs:
            yield Value("concordance", ordered / pairs, len(y))


def concordant_pairs(risks: np.ndarray, events: np.ndarray, times: np.ndarray) -> tuple[float, int]:
    """Return how many pairs are in the order of the risks, equal risks counted half, and how many are comparable."""
    ordered = 0.0
    pairs = 0
    with_event = np.flatnonzero(events)
    at_once = max(1, _PAIRS // max(1, len(times)))
    for start in range(0, len(with_event), at_once):
        first = with_event[start : start + at_once, None]
        stays_longer = (times > times[first]) | ((times == times[first]) & ~events)
        is_higher = risks[first] > risks
        is_equal = risks[first] == risks
        pairs += int(stays_longer.sum())
        ordered += float((stays_longer & is_higher).sum()) + 0.5 * float((stays_longer & is_equal).sum())
    return ordered, pairs
