"""Models, losses and tensors in float64, in which two ways of computing the same agree but for a hair."""

import copy
import functools

import torch
from torch import Tensor, nn

from rayfed.core.task import Loss


def in_double(value: Tensor) -> Tensor:
    """Return a tensor in float64, unless it holds integers, truth values or complex numbers."""
    if value.is_floating_point():
        return value.double()
    return value


def module_in_double(module: nn.Module) -> nn.Module:
    """Return `module`, whose tensors are changed to float64."""
    if getattr(module, "feature_shape", ()):
        module.feature_dtype = torch.float64  # type: ignore[assignment]
    return module.double()


def loss_in_double(loss: Loss) -> Loss:
    """Return a copy of a loss with its tensors in float64, as far as they can be seen."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, functools.partial):
        tensors = {}
        for key, value in loss.keywords.items():
            if isinstance(value, Tensor):
                tensors[key] = in_double(value)
        inner = loss_in_double(loss.func)
        return functools.partial(inner, *loss.args, **(loss.keywords | tensors))
    return loss
