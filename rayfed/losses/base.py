"""The interface of losses: (outputs [n, ...], labels [n, ...]) -> the mean over the batch, a scalar tensor. Those of
`torch.nn.functional` are here; each receives labels in the form that it takes."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.core.errors import UsageError, error_line
from rayfed.core.options import arguments_for, build, option
from rayfed.core.registry import resolve
from rayfed.losses import LOSSES

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """Base class of rayfed's losses. A user's own loss need not derive from it."""

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        """Return how many outputs per example a model needs, by the shape of one label and the number of classes."""
        return num_classes

    def check_labels(self, where: str, labels: np.ndarray) -> None:
        """Raise UsageError if this loss cannot take `labels` [n, ...], which are those of `where`."""

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of `outputs` [n, ...] for the labels `y` [n, ...]."""
        raise NotImplementedError


def build_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """Return the loss called `name`.

    Args:
        name: A key of `LOSSES`, or a user's `module:Name`. That is a function (outputs, y, **options), or a class:
            its instances are called with (outputs, y), and its fields or arguments are the options.

    Raises:
        UsageError: The name or an option is unknown, or an option has the wrong type or is out of range.
    """
    target: Any = resolve(name, LOSSES, where="loss.name")
    if isinstance(target, type) and dataclasses.is_dataclass(target):
        built: Any = build(target, options, where="loss", also=("name",))
        return built  # type: ignore[no-any-return]
    arguments = arguments_for(target, options)
    if inspect.isclass(target):
        _check_arguments(target, (), arguments, f"loss.name={name}: is made with (**options)")
        return _made(name, target, arguments)  # type: ignore[no-any-return]
    form = "(outputs, labels, **options)"
    _check_arguments(target, (None, None), arguments, f"loss.name={name}: is called with {form}")
    if arguments:
        return functools.partial(target, **arguments)
    return target  # type: ignore[no-any-return]


def _made(name: str, target: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return target(**arguments)
    except UsageError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"loss.name={name}: cannot be made: {error_line(error)}") from error


def _check_arguments(target: Any, given: Sequence[Any], options: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if `target` cannot be called with these arguments; some callables do not say."""
    try:
        inspect.signature(target).bind(*given, **options)
    except TypeError as error:
        raise UsageError(f"{where}: {error}") from error
    except ValueError:  # it has no signature
        pass


def needed_outputs(loss: Loss, label_shape: tuple[int, ...], num_classes: int) -> int:
    """Return how many outputs per example `loss` needs; one per class for a loss of the user's own."""
    if isinstance(loss, NamedLoss):
        return loss.outputs(label_shape, num_classes)
    return num_classes


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(NamedLoss):
    """Cross-entropy of the softmax of one output per class, torch's `cross_entropy`."""

    weight: list[float] | None = option(
        None, above=0, help="weight of each class; a batch's mean is divided by the weights of its examples"
    )
    ignore_index: int = option(-100, help="label of the examples or positions that do not count")

    def __call__(self, outputs: Tensor, y: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(outputs, y, **self.options_for(outputs), label_smoothing=label_smoothing)

    def options_for(self, outputs: Tensor) -> dict[str, Any]:
        """Return the options of torch's `cross_entropy`, with tensors on the device of `outputs`."""
        weight = None
        if self.weight is not None:
            weight = torch.tensor(self.weight, dtype=outputs.dtype, device=outputs.device)
        return {"weight": weight, "ignore_index": self.ignore_index}


class PerOutput(NamedLoss):
    """A loss that compares each output with a number: labels [n] with one output, labels [n, k] with k."""

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        if len(label_shape) == 1:
            return label_shape[0]
        return 1

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        numbers = y.to(outputs.dtype)
        return self.compare(outputs, numbers.reshape(outputs.shape))

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of two tensors of one shape."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BceWithLogits(PerOutput):
    """Binary cross-entropy of the sigmoid of each output, torch's `binary_cross_entropy_with_logits`. A model has one
    output for the classes 0 and 1, or k for labels [n, k] of zeros and ones."""

    pos_weight: float | None = option(None, above=0, help="weight of the examples of class 1; of class 0 it is 1")

    def outputs(self, label_shape: tuple[int, ...], num_classes: int) -> int:
        if not label_shape and num_classes > 2:
            raise UsageError(f"loss.name=bce_with_logits has one logit for {num_classes} classes; use cross_entropy")
        return super().outputs(label_shape, num_classes)

    def compare(self, outputs: Tensor, y: Tensor) -> Tensor:
        weight = None
        if self.pos_weight is not None:
            weight = torch.full((), self.pos_weight).to(outputs)
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
