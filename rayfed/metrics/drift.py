"""Client drift: how far local training carried a client's model from the one that it downloaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.metrics.base import OfTraining


@dataclass(frozen=True, kw_only=True)
class Drift(OfTraining):
    """`drift`: ‖w_i − w‖₂ over all parameters; `drift_relative`: the same, divided by ‖w‖₂."""

    def measure(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterable[tuple[str, float]]:
        moved = _norm(after[name].double() - before[name].double() for name in before)
        yield "drift", moved
        start = _norm(value.double() for value in before.values())
        if start:
            yield "drift_relative", moved / start


def _norm(values: Iterable[Tensor]) -> float:
    return float(torch.stack([value.square().sum() for value in values]).sum().sqrt())
