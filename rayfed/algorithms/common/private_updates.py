"""FedBN whose parties send clipped updates, and take turns: each is asked as seldom as can be."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import Context
from rayfed.algorithms.fedbn import FedBN
from rayfed.core.options import option
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class PrivateUpdates(FedBN):
    sample_without_replacement: ClassVar[bool] = True

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together, for a party")
    clip: float = option(1.0, above=0, help="C, bound of an update's norm")

    def turns(self, ctx: Context, rounds: int) -> int:
        """In how many of the first `rounds` rounds a party is asked at most."""
        return math.ceil(rounds / max(1, ctx.task.num_clients // len(ctx.cohort)))  # unseen clients may be more than N

    def turns_so_far(self, ctx: Context) -> int:
        return self.turns(ctx, min(ctx.round, ctx.rounds))

    def clipped(self, sent: Weights, base: Weights, order: int) -> Weights:
        """Differences of the floating-point weights, scaled down to an L1 (`order` 1) or L2 norm of at most C."""
        deltas = {name: sent[name] - base[name] for name in sent if sent[name].is_floating_point()}
        whole = torch.cat([delta.flatten() for delta in deltas.values()])
        norm = whole.norm(order, dtype=torch.float64)  # float32 loses a tenth of the L1 norm of 37 million numbers
        factor = (self.clip / norm).clamp(max=1)
        return {name: factor * delta for name, delta in deltas.items()}
