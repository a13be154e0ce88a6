"""Checks that hooks do not modify their inputs.

`untouched` costs next to nothing and guards every run: it compares the counters that torch keeps of in-place changes.
`rayfed check` and the tests use `intercepted` and `pure`, which compare every bit that a hook is lent.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from rayfed.algorithm import Algorithm, Exchange
from rayfed.core.errors import BadHook
from rayfed.core.network import put_left_back
from rayfed.core.task import Task
from rayfed.core.trees import leaves, tensor_bytes
from rayfed.engine.device_data import Part

HOOKS = (
    *("check", "modules", "adapt", "init", "broadcast", "unicast", "weight", "weights", "aggregate", "join", "phases"),
    *("start", "prepare", "step", "finish", "global_model", "downloaded_model", "trained_model", "predict"),
)
"""The hooks that `intercepted` intercepts."""
_STAGES = ("setup_exchanges", "round_exchanges", "final_exchanges")
_OWN = {("step", "work"), ("finish", "work")}  # the inputs that a hook may change

Around = Callable[..., Any]
"""Called as around(name, hook, self, *args, **kwargs) in place of a hook."""


class ImpureHook(BadHook):
    """A hook modified one of its inputs."""


@contextmanager
def untouched(hook: str, **inputs: Any) -> Iterator[None]:
    """Raise `ImpureHook` if a tensor in one of `inputs` is modified in place within the block."""
    before = {}
    for name, tree in inputs.items():
        before[name] = [tensor._version for tensor in leaves(tree)]
    yield
    for name, tree in inputs.items():
        if before[name] != [tensor._version for tensor in leaves(tree)]:
            raise ImpureHook(
                f"{hook} changed `{name}` in place; other clients and rounds share it, so a hook must return new "
                "state: write x = x + y, not x += y or x.add_(y), or clone first (only `work` may be changed in place)"
            )


def intercepted(algorithm: Algorithm, around: Around) -> Algorithm:
    """Return a copy of `algorithm` in which `around` is called in place of its hooks and those of its exchanges.

    Hooks that are called by another hook are called directly.
    """
    running: list[str] = []

    def wrapped(kind: type, name: str) -> Any:
        original = getattr(kind, name)

        def hook(self: Exchange, *args: Any, **kwargs: Any) -> Any:
            if running:
                return original(self, *args, **kwargs)
            running.append(name)
            try:
                return around(name, original, self, *args, **kwargs)
            finally:
                running.pop()

        return hook

    def copy_of(exchange: Exchange) -> Any:
        kind: Any = type(exchange)
        members = {name: wrapped(kind, name) for name in HOOKS if hasattr(kind, name)}
        for name in ("server_side_weighting", "prepares_batches"):  # not derived from the hooks overridden here
            members[name] = getattr(exchange, name)
        if isinstance(exchange, Algorithm):
            for name in _STAGES:
                members[name] = property(partial(exchanges, kind=kind, name=name))
            members["adaptation"] = property(lambda self: of(self, _attribute(self, kind, "adaptation")))
        copied: Any = object.__new__(type("Intercepted", (kind,), members))
        vars(copied).update(vars(exchange))
        return copied

    def of(owner: Exchange, exchange: Exchange) -> Any:
        if exchange is owner or type(exchange).__name__ == "Intercepted":
            return exchange
        return copy_of(exchange)

    def exchanges(self: Exchange, kind: type, name: str) -> tuple[Exchange, ...]:
        return tuple(of(self, exchange) for exchange in _attribute(self, kind, name))

    result: Algorithm = copy_of(algorithm)
    return result


def _attribute(self: Exchange, kind: type, name: str) -> Any:
    """Return what `kind` has as `name`: the value of a property for `self`, or an attribute of the class."""
    found = inspect.getattr_static(kind, name)
    if isinstance(found, property) and found.fget:
        return found.fget(self)
    return found


def pure(name: str, hook: Callable[..., Any], self: Exchange, *args: Any, **kwargs: Any) -> Any:
    """Call a hook, and raise `ImpureHook` if anything that it was lent has changed by a bit. See `intercepted`."""
    parameters = list(inspect.signature(hook).parameters)
    named = dict(zip(parameters, (self, *args), strict=False)) | kwargs
    lent = {}
    put_left_back()  # the weights of the last step, which are no part of the task
    for parameter, value in named.items():
        if (name, parameter) not in _OWN:
            lent[parameter] = value, facts(value)
    result = hook(self, *args, **kwargs)
    put_left_back()
    changed = []
    for parameter, (value, before) in lent.items():
        if facts(value) == before:
            continue
        if parameter == "self":
            changed.append("an attribute of the algorithm")
        else:
            changed.append(f"`{parameter}`")
    if changed:
        what = " and ".join(changed)
        raise ImpureHook(f"{name} changed {what}; other clients and rounds share it, so a hook must return new state")
    return result


def facts(value: Any) -> Any:
    """Return everything that can change about `value` as plain data: keys, lengths and the bits of every tensor."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), tensor_bytes(value).tobytes()
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(facts, value))
    if isinstance(value, Part):
        return facts({"x": value.x, "y": value.y})
    if isinstance(value, Task):
        networks = [value.model, *value.modules.values()]
        held = []
        for n in networks:
            held.append([*n.module.parameters(), *n.module.buffers()])
        task = [value.initial_weights(), held, sorted(value.personal_names), value.trainable, sorted(value.modules)]
        return facts(task)
    if isinstance(value, Exchange):
        return {key: facts(item) for key, item in vars(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        of_fields = {}
        for field in dataclasses.fields(value):
            of_fields[field.name] = facts(getattr(value, field.name))
        return of_fields
    return repr(value)
