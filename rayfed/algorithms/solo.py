"""SOLO: every client trains its own network alone, the baseline of Li, He and Song 2023 (ADCOL), section 5.

    client:  w_i ← SGD on its own mean loss f_i, continuing from the last round
    server:  does nothing; nothing is sent

All clients start from the same weights. Rounds only determine when models are scored, so the optimiser's state is kept
between them.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.task import Task


@dataclass(frozen=True, kw_only=True)
class Solo(FedAvg):
    name: ClassVar[str] = "solo"
    reference: ClassVar[str] = "Li, He and Song 2023 (ADCOL), section 5, baseline SOLO"
    default_eval_point: ClassVar[str] = "downloaded"
    keeps_optimizer: ClassVar[bool | None] = True

    def personal(self, task: Task) -> frozenset[str]:
        return frozenset((*task.parameters, *task.buffers))
