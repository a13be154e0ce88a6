"""DBE's model and loss term: a bias between features and head, and the regularised running mean of the features."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from rayfed.core.task import Output
from rayfed.core.trees import Weights

BIAS, MEAN, CONSENSUS = EXTRAS = ("dbe.bias", "dbe.mean", "dbe.consensus")


class TwoLevels(nn.Module):
    """`model` with a trainable bias added to its features before its head; the model's weights keep their names.

    `features` is the first level z^g, `head` adds the bias z^p. The model is no child of this module, which would
    rename its weights: they share its tables of parameters, buffers and children instead.
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
    """m ← (1−μ)·m + μ·z̄ with z̄ the batch mean of the features, and κ/2 · mean((m − consensus)²) on top of the loss.

    The gradient flows through μ·z̄ alone: the old m is a buffer.
    """

    kappa: float
    mu: float

    def __call__(self, loss: Tensor, weights: Weights, output: Output) -> tuple[Tensor, Output]:
        mean = (1 - self.mu) * weights[MEAN] + self.mu * output.features.mean(0)
        if self.kappa:
            loss = loss + self.kappa / 2 * (mean - weights[CONSENSUS]).square().mean()
        return loss, output._replace(buffers=output.buffers | {MEAN: mean.detach()})
