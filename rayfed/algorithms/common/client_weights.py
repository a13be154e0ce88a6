"""How clients are weighed: by their examples or equally, or by the losses that they report (AFL, VM, centralised)."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import Context, Exchange, ProblemSpec, Reply
from rayfed.core.errors import UsageError
from rayfed.core.modules import batch_norm_statistics
from rayfed.core.options import option


def reported_losses(replies: Sequence[Reply]) -> Tensor:
    """Return the losses f_i [replies] in float64."""
    losses = [reply.up["loss"].double() for reply in replies]
    return torch.stack(losses)


def shares(method: Exchange, ctx: Context, replies: Sequence[Reply]) -> Tensor:
    """Return the shares p_i [replies] in float64: n_i / N, or equal ones, as the method's `weight` says."""
    weights = [method.weight(ctx, reply.examples) for reply in replies]
    values = torch.tensor(weights, dtype=torch.float64, device=ctx.task.device)
    return values / values.sum()


def refuse_averaged_variances(
    problem: ProblemSpec,
    name: str,
    personal: Collection[str],
    *,
    alternatives: str = "local_statistics, local or frozen",
) -> None:
    """Raise UsageError if weights, which may be negative, would average running variances of batch norm.

    `personal` are the names of the weights that stay with the clients, and `alternatives` the batch-norm policies that
    average no statistics.
    """
    task = problem.task
    if task.batch_norm == "frozen":
        return
    averaged = batch_norm_statistics(task.model.module) - set(personal)
    if averaged:
        raise UsageError(
            f"batch_norm={task.batch_norm}: algorithm.name={name} may give clients negative weights, which turn "
            f"averaged running variances negative; use batch_norm={alternatives}, or a model without batch norm"
        )


def check_smallest_weight(smallest: float, count: int, noun: str) -> None:
    """Raise UsageError if `count` weights of at least `smallest` cannot sum to 1; `noun` says what they belong to."""
    if smallest * count > 1 + 1e-9:
        raise UsageError(f"algorithm.lambda_min={smallest:g}: at most 1/{count} = {1 / count:.4g} for {count} {noun}")


def weighting_option(default: str, note: str = "") -> Any:
    """Declare `weighting`; `note` says what is peculiar to the method."""
    help = f"weigh clients by their training examples, or equally{note}"
    return option(default, choices=("examples", "equal"), help=help)


def refuse_sampling(problem: ProblemSpec, name: str, reason: str) -> None:
    """Raise UsageError if a round may leave clients out; `reason` says what the method does with all of them."""
    if not problem.full_participation:
        raise UsageError(f"cohort={problem.cohort}: algorithm.name={name} {reason}; leave out cohort and cohort_share")
