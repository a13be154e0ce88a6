"""The losses of `torch.nn.functional`, with labels brought into the form that each of them takes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.losses.base import NamedLoss


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(NamedLoss):
    """Cross-entropy of the softmax of one output per class, torch's `cross_entropy`."""

    weight: list[float] | None = option(
        None, above=0, help="weight of each class; a batch's mean is divided by the weights of its examples"
    )
    ignore_index: int = option(-100, help="label of the examples or positions that do not count")

    def __call__(self, outputs: Tensor, y: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        weight = None if self.weight is None else torch.tensor(self.weight, dtype=outputs.dtype, device=outputs.device)
        return F.cross_entropy(outputs, y, weight, ignore_index=self.ignore_index, label_smoothing=label_smoothing)


class PerOutput(NamedLoss):
    """A loss that compares each output with a number: labels [n] with one output, labels [n, k] with k."""

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        return label_shape[0] if len(label_shape) == 1 else 1

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.compare(outputs, y.to(outputs.dtype).reshape(outputs.shape))

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of two tensors of one shape."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BceWithLogits(PerOutput):
    """Binary cross-entropy of the sigmoid of each output, torch's `binary_cross_entropy_with_logits`: one output for
    the classes 0 and 1, or k for labels [n, k] of zeros and ones."""

    pos_weight: float | None = option(None, above=0, help="weight of the examples of class 1; of class 0 it is 1")

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        if not label_shape and num_classes > 2:
            raise UsageError(f"loss.name=bce_with_logits has one logit for {num_classes} classes; use cross_entropy")
        return super().outputs(label_shape, num_classes)

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        weight = None if self.pos_weight is None else torch.full((), self.pos_weight).to(outputs)
        return F.binary_cross_entropy_with_logits(outputs, y, pos_weight=weight)


class Mse(PerOutput):
    """Mean squared error, torch's `mse_loss`."""

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs, y)


class L1(PerOutput):
    """Mean absolute error, torch's `l1_loss`."""

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(outputs, y)


@dataclass(frozen=True, kw_only=True)
class SmoothL1(PerOutput):
    """Squared error up to `beta` and absolute error beyond, torch's `smooth_l1_loss`."""

    beta: float = option(1.0, above=0, help="error at which the loss turns from squared to absolute")

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(outputs, y, beta=self.beta)
