"""Weights of clients that depend on the losses that they report: for AFL, Gen-AFL, VM and centralised training.

These methods need every client in every round: weights of a part of the clients would not sum to 1, and negative ones
cannot be renormalised.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rayfed.algorithm import ProblemSpec, Reply
from rayfed.core.errors import UsageError
from rayfed.core.modules import batch_norm_statistics

NEEDS_ALL_LOSSES = "weighs the clients by the losses of all of them"
"""Why client sampling is refused."""


def reported_losses(replies: Sequence[Reply]) -> tuple[Tensor, Tensor]:
    """Return (losses f_i, shares n_i / N), each [clients] in float64, in the order of the replies."""
    losses = torch.stack([reply.up["loss"].double() for reply in replies])
    examples = torch.tensor([float(reply.examples) for reply in replies], dtype=torch.float64, device=losses.device)
    return losses, examples / examples.sum()


def refuse_averaged_variances(
    problem: ProblemSpec,
    name: str,
    personal: Collection[str],
    *,
    alternatives: str = "local_statistics, local or frozen",
) -> None:
    """Raise UsageError if weights, which may be negative, would average running variances of batch norm.

    Args:
        personal: Names of the weights that stay with the clients.
        alternatives: The batch-norm policies that average no statistics.
    """
    task = problem.task
    if task.batch_norm != "frozen" and batch_norm_statistics(task.model.module) - set(personal):
        raise UsageError(
            f"batch_norm={task.batch_norm}: algorithm.name={name} may give clients negative weights, which turn "
            f"averaged running variances negative; use batch_norm={alternatives}, or a model without batch norm"
        )


def check_smallest_weight(smallest: float, count: int, noun: str) -> None:
    """Raise UsageError if `count` weights of at least `smallest` cannot sum to 1; `noun` says what they belong to."""
    if smallest * count > 1 + 1e-9:
        raise UsageError(
            f"algorithm.lambda_min={smallest:g}: the weights of {count} {noun} sum to 1, so the smallest can be at "
            f"most 1/{count} = {1 / count:.4g}"
        )
