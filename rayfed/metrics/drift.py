"""Client drift: the distance between a client's model after local training and the one that it downloaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.metrics.base import OfTraining


@dataclass(frozen=True, kw_only=True)
class Drift(OfTraining):
    """`drift`: ‖w_i − w‖₂ over all parameters; `drift_relative`: the same, divided by ‖w‖₂."""

    higher_is_better = False  # neither is good or bad; clients that are alike drift less

    def measure(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterable[tuple[str, float]]:
        distance = _norm(after[name].double() - before[name].double() for name in before)
        yield "drift", distance
        norm = _norm(value.double() for value in before.values())
        if norm:
            yield "drift_relative", distance / norm


def _norm(values: Iterable[Tensor]) -> float:
    return float(torch.stack([value.square().sum() for value in values]).sum().sqrt())
