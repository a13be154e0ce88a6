"""Bit-for-bit comparison of weights and of anything that a hook receives."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import Exchange
from rayfed.core.task import Task
from rayfed.core.trees import Weights
from rayfed.engine.device_data import Part


def facts(value: Any) -> Any:
    """Return everything that can change about `value` as plain data: keys, lengths and the bits of every tensor."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).numpy().tobytes()
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts(item) for item in value]
    if isinstance(value, Part):
        return facts({"x": value.x, "y": value.y})
    if isinstance(value, Task):
        networks = [value.model, *value.modules.values()]
        held = [[*n.module.parameters(), *n.module.buffers()] for n in networks]
        return facts(
            [value.initial_weights(), held, sorted(value.personal_names), value.trainable, sorted(value.modules)]
        )
    if isinstance(value, Exchange):
        return {key: facts(item) for key, item in vars(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: facts(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


def equal(a: Weights, b: Weights) -> bool:
    """Return whether two flat mappings of tensors have the same names and values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
