"""DBE's model and loss term: a bias between features and head, and the regularised running mean of the features."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithms.common.networks import WrappedModel
from rayfed.core.task import Output, Task
from rayfed.core.trees import Weights

BIAS, MEAN, CONSENSUS = DBE_WEIGHTS = ("dbe.bias", "dbe.mean", "dbe.consensus")


class BiasedModel(WrappedModel):
    """A model with a trainable bias that is added to the features before the head.

    `features` returns the representation z^g, and `head` adds the personal bias z^p.

    Args:
        bias: Whether there is a personal bias (PRBM).
        means: Whether there are buffers for the running mean and the consensus (MR).
    """

    dbe: Any

    def __init__(self, model: Any, *, bias: bool, means: bool):
        extra = nn.Module()
        extra.register_parameter("bias", nn.Parameter(torch.zeros(model.feature_shape)) if bias else None)
        for name in ("mean", "consensus") if means else ():
            extra.register_buffer(name, torch.zeros(model.feature_shape))
        super().__init__(model, "dbe", extra)

    def head(self, features: Tensor) -> Tensor:
        return self.model.head(features if self.dbe.bias is None else features + self.dbe.bias)


@dataclass(frozen=True)
class MeanRegulariser:
    """The loss term κ/2 · mean((m − z̄^g)²), which also updates the running mean m ← (1−μ)·m + μ·(batch mean of f(x)).

    The gradient flows through the batch mean only, since the old m is a buffer.
    """

    kappa: float
    mu: float

    def __call__(self, loss: Tensor, weights: Weights, output: Output) -> tuple[Tensor, Output]:
        mean = (1 - self.mu) * weights[MEAN] + self.mu * output.features.mean(0)
        if self.kappa:
            loss = loss + self.kappa / 2 * (mean - weights[CONSENSUS]).square().mean()
        return loss, output._replace(buffers=output.buffers | {MEAN: mean.detach()})


def tracking_only(task: Task) -> Task:
    """Return `task` with a regulariser that updates the running mean but adds nothing to the loss."""
    task = copy.copy(task)
    task.loss_terms = tuple(
        replace(term, kappa=0.0) if isinstance(term, MeanRegulariser) else term for term in task.loss_terms
    )
    return task
