"""State outside weights and buffers, such as counters, which would go from one client to the next on its host."""

import contextlib
import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.rng import global_generators_seeded
from rayfed.core.task import Batch
from rayfed.core.trees import clone
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.serialization import tensor_bytes
from rayfed.models.split_model import SplitModel

_EXAMPLES = 4  # of a batch
_TORCHS = frozenset(vars(nn.Module())) - {"_buffers", "_modules"}


def refuse_leaks(blueprint: Blueprint, population: Population) -> None:
    """Raise UsageError if attributes of the model or of the loss depend on the training steps taken before.

    Two copies take a step on two batches, in both orders. What a step leaves behind may differ between the batches, as
    the features of the last one do, but not with what came before.
    """
    part = population.clients[int(population.clients.train_sizes().argmax())].train
    size = min(_EXAMPLES, len(part) // 2)
    if size < 2:
        return
    x, y = (torch.from_numpy(values[: 2 * size].copy()) for values in (part.x, part.y))
    batches = list(map(Batch, (x.float() if x.dtype == torch.uint8 else x).split(size), y.split(size)))
    seen: dict[int, dict[str, object]] = {}
    for order in ((0, 1), (1, 0)):
        loss = blueprint.training_loss or blueprint.loss
        with contextlib.suppress(Exception):  # of objects that cannot be copied; their state goes on
            loss = copy.deepcopy(loss)
        task = replace(blueprint, training_loss=loss).context(population, "cpu").task.without_loss_terms()
        module: nn.Module = task.model.module
        module = module.features if type(module) is SplitModel else module
        for number in order:
            with global_generators_seeded(0, "leaks"):
                try:
                    task.gradients(clone(task.initial_weights()), batches[number])
                except Exception:  # other checks say why
                    return
            facts = dict(_facts("model", module, set())) | dict(_facts("loss", task._loss, set()))
            before = seen.setdefault(number, facts)
            for name in before | facts:
                if before.get(name) != facts.get(name):
                    kind, _, attribute = name.partition(".")
                    raise UsageError(
                        f"{kind}: training changes {attribute or 'its state'}, which is no buffer and would go from "
                        "client to client; keep it by register_buffer in the model, or leave it out"
                    )


def _facts(name: str, value: Any, visited: set[int]) -> Iterator[tuple[str, object]]:
    """Yield what can change about `value`, by dotted names, in a form that can be compared."""
    if isinstance(value, Tensor):
        yield name, (value.dtype, value.shape, tensor_bytes(value).tobytes())
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        yield name, repr(value)
    elif id(value) not in visited and not isinstance(value, (type, types.ModuleType, torch.dtype)):
        visited.add(id(value))
        parts = dict(_parts(value))
        yield name, len(parts) or (type(value), _state(value))
        for key, part in parts.items():
            yield from _facts(name if key in ("_buffers", "_modules") else f"{name}.{key}", part, visited)


def _parts(value: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(value, nn.Module):
        yield from ((key, part) for key, part in vars(value).items() if key not in _TORCHS)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from vars(value).items()
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield key, cell.cell_contents
    else:
        yield from getattr(value, "__dict__", {}).items()


def _state(value: Any) -> object:
    """Return the state of an object without attributes: of arrays, sets, generators, and what its text shows."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    text = repr(value)
    return None if " at 0x" in text else text
