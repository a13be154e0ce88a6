"""What the private variants of FedBN share: clipped updates, and how often a client takes part."""

import math

import torch

from rayfed.algorithm import Context
from rayfed.core.trees import Weights


def clipped_update(sent: Weights, base: Weights, *, bound: float, order: int) -> Weights:
    """Return sent − base for floating-point weights, scaled down to an L1 (`order` 1) or L2 norm of at most `bound`."""
    deltas = {name: sent[name] - base[name] for name in sent if sent[name].is_floating_point()}
    vector = torch.cat([delta.flatten() for delta in deltas.values()])
    norm = vector.norm(order, dtype=torch.float64)  # float32 loses a tenth of the L1 norm of 37 million numbers
    factor = (bound / norm).clamp(max=1)
    return {name: factor * delta for name, delta in deltas.items()}


def max_participations(ctx: Context, rounds: int) -> int:
    """Return how often a client takes part in the first `rounds` rounds at most, drawn without replacement."""
    cohorts = max(1, ctx.task.num_clients // len(ctx.cohort))  # 1: a cohort of unseen clients may exceed N
    return math.ceil(rounds / cohorts)


def max_participations_so_far(ctx: Context) -> int:
    """Return the same for the rounds until now; those of the final stage do not count."""
    return max_participations(ctx, min(ctx.round, ctx.rounds))
