"""DBE's model and loss term: a bias between features and head, and the regularised running mean of the features."""

import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from rayfed.core.task import Output, Task
from rayfed.core.trees import Weights

BIAS, MEAN, CONSENSUS = DBE_WEIGHTS = ("dbe.bias", "dbe.mean", "dbe.consensus")


class BiasedModel(nn.Module):
    """A model with a trainable bias that is added to the features before the head.

    `features` returns the representation z^g, and `head` adds the personal bias z^p. The weights of `model` keep their
    names: it is no child of this module, which would rename them, but shares its tables of parameters, buffers and
    children.

    Args:
        model: The model, with `features` and `head`.
        bias: Whether there is a personal bias (PRBM).
        means: Whether there are buffers for the running mean and the consensus (MR).
    """

    model: Any
    dbe: Any
    feature_shape: tuple[int, ...]

    def __init__(self, model: Any, *, bias: bool, means: bool):
        super().__init__()
        self.__dict__["model"] = model
        self._parameters, self._buffers = model._parameters, model._buffers
        self.feature_shape = tuple(model.feature_shape)
        extra = nn.Module()
        extra.register_parameter("bias", nn.Parameter(torch.zeros(self.feature_shape)) if bias else None)
        for name in ("mean", "consensus") if means else ():
            extra.register_buffer(name, torch.zeros(self.feature_shape))
        self._modules.update({**model._modules, "dbe": extra})

    def train(self, mode: bool = True) -> Self:
        self.model.training = mode
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        return self.model.features(x)

    def head(self, features: Tensor) -> Tensor:
        return self.model.head(features if self.dbe.bias is None else features + self.dbe.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


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
