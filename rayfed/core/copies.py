"""Copies of modules, also of those that torch refuses to copy or to pickle."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import _inject_new_class, _inject_property, is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

M = TypeVar("M", bound=nn.Module)


def copied(module: M, tensors: Mapping[int, Tensor] | None = None) -> M:
    """Return a copy of `module`, in which `tensors`, by the `id` of the originals, take the place of some.

    Attributes that hold results of the last forward pass, as pruned layers and torch's old weight normalisation have,
    are copied without their graph.
    """
    attributes = (value for layer in module.modules() for value in vars(layer).values() if isinstance(value, Tensor))
    results = {id(value): value.detach().clone() for value in attributes if not value.is_leaf}
    return copy.deepcopy(module, results | dict(tensors or {}))


@torch.no_grad()
def recompute(module: nn.Module) -> None:
    """Compute the attributes of `module` that follow from its parameters, which torch else does in a forward pass."""
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm)):
                hook(layer, None)


def make_picklable(module: nn.Module) -> None:
    """Let the parametrised layers of `module` be pickled, such as those of torch's weight normalisation.

    Each has a class of its own, made by torch, which only lacks a way to be made again elsewhere.
    """
    for layer in module.modules():
        if is_parametrized(layer):
            type(layer).__reduce_ex__ = _reduced  # type: ignore[assignment, method-assign]


def _reduced(layer: Any, protocol: int) -> tuple[Any, ...]:
    original: Any = type(layer).__base__
    return _made_again, (original, tuple(layer.parametrizations)), original.__getstate__(layer)


def _made_again(original: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    layer = original.__new__(original)
    _inject_new_class(layer)
    type(layer).__reduce_ex__ = _reduced  # type: ignore[assignment, method-assign]
    for name in names:
        _inject_property(layer, name)
    return layer
