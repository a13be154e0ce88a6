"""What tells a user's own code from another of the same name: hashes of models, losses and classes not of rayfed."""

import dataclasses
import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.algorithm import Algorithm
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.engine.serialization import state_hash
from rayfed.experiments.config import Config
from rayfed.results.trials import recorded_value


def checked_code(config: Config, trial: str) -> str | None:
    """The hash of the user's own classes that the configuration names, None without any.

    Raises:
        UsageError: resume would go on from what other code has left.
    """
    own = dict(own_classes(config))
    if not own:
        return None
    now = code_hash(*own.values(), roots={_root(getattr(thing, "__module__", None)) for thing in own.values()})
    if config.resume:
        before = recorded_value(config.results, config.experiment, trial, "code_hash")
        if before is not None and before != now:
            raise UsageError(
                f"resume=true: {' or '.join(own)}: its code (or Python's version) changed since {trial} ran; give "
                "another experiment, or resume=false"
            )
    return now


def own_classes(config: Config) -> Iterator[tuple[str, Any]]:
    """What the configuration names as module:Name outside of rayfed, by that name."""
    algorithm: Any = config.algorithm
    while algorithm is not None:
        if not type(algorithm).__module__.startswith("rayfed."):
            yield f"{type(algorithm).__module__}:{type(algorithm).__qualname__}", type(algorithm)
        fields = [getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)]
        algorithm = next((value for value in fields if isinstance(value, Algorithm)), None)
    named = [choice.name for choice in (config.data, config.partition, config.model, config.augment)]
    for name in (*named, *config.metrics):
        if name and ":" in name and not name.startswith("rayfed."):
            yield name, resolve(name, {}, where="name")


def own_name(thing: Any, digest: str) -> str:
    """A user's own model or loss in the tables: what it is called, and a hash to tell it from another of that name."""
    name = thing.__qualname__ if hasattr(thing, "__qualname__") else type(thing).__qualname__
    return f"own:{name.rpartition('<locals>.')[2].replace('<lambda>', 'lambda')}-{digest[:6]}"


def model_hash(given: Any, built: nn.Module) -> str:
    """Of a user's own model: of a factory, what it does and makes but not the weights, which follow the seed."""
    if isinstance(given, nn.Module):
        return code_hash(built)
    code = _Code(weights=False)
    code.feed(given)
    code.feed(built)
    return code.found.hexdigest()


def code_hash(*things: Any, roots: Set[str] = frozenset()) -> str:
    """Of what `things` do; `roots` are packages that are the user's own, though installed."""
    code = _Code(roots=roots)
    for thing in things:
        code.feed(thing)
    return code.found.hexdigest()


def _root(module: str | None) -> str:
    return (module or "builtins").partition(".")[0]


_BARE = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


class _Code:
    """A hash of what a user's functions, classes and objects do.

    It is of the bytecode, and not of the source: a lambda's source is the whole line where it stands, a class may have
    been given another method since, and a file may have been edited after it was imported. Functions and classes that
    a function calls by a global name count where they are the user's own; of an installed package the name counts.
    """

    def __init__(self, *, weights: bool = True, roots: Set[str] = frozenset()) -> None:
        self.found = hashlib.blake2b(digest_size=16)
        self.weights = weights  # whether the values of parameters and buffers count, or only their shapes
        self.roots = {"__main__", *roots} - {"rayfed"}
        self._seen: dict[int, Any] = {}  # holds what it has seen, so that no id comes twice

    def put(self, *texts: Any) -> None:
        self.found.update(repr(texts).encode())

    def feed(self, thing: Any) -> None:
        if isinstance(thing, _PLAIN):
            self.put(type(thing).__name__, thing)
        elif isinstance(thing, types.CodeType):
            self._code(thing)
        elif isinstance(thing, torch.Tensor):
            self._tensor(thing)
        elif isinstance(thing, (np.ndarray, np.generic)) and not thing.dtype.hasobject:
            self.put("array", thing.dtype.str, thing.shape, thing.tobytes())
        elif isinstance(thing, (set, frozenset)):
            self.put("set", sorted(_shown(item) for item in thing))
        elif id(thing) in self._seen:
            self.put("again")
        else:
            self._seen[id(thing)] = thing
            self._compound(thing)
            if isinstance(thing, (tuple, list, dict)):
                del self._seen[id(thing)]  # equal constants may or may not be one object: only a cycle is seen

    def _compound(self, thing: Any) -> None:
        if isinstance(thing, Mapping):
            self.put("mapping", len(thing))
            for key, value in thing.items():
                self.feed(key)
                self.feed(value)
        elif isinstance(thing, (tuple, list)):
            self.put(type(thing).__name__, len(thing))
            for item in thing:
                self.feed(item)
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self._class(thing)
        elif isinstance(thing, (staticmethod, classmethod)):
            self.feed(thing.__func__)
        elif isinstance(thing, types.MethodType):
            self.feed((thing.__self__, thing.__func__))
        elif isinstance(thing, property):
            self.feed((thing.fget, thing.fset))
        elif isinstance(thing, cached_property):
            self.feed(thing.func)
        elif isinstance(thing, functools.partial):
            self.feed((thing.func, thing.args, thing.keywords))
        elif isinstance(thing, nn.Module):
            self._module(thing)
        elif hasattr(thing, "__wrapped__"):  # functools.cache
            self.feed(thing.__wrapped__)
        elif self._is_own(type(thing).__module__) and hasattr(thing, "__dict__") and not isinstance(thing, enum.Enum):
            self.feed(type(thing))
            self.feed(dict(sorted(vars(thing).items())))
        else:
            self.put(type(thing).__module__, type(thing).__qualname__, _shown(thing))

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.put("tensor", str(tensor.dtype), tuple(tensor.shape))
        if self.weights or not isinstance(tensor, nn.Parameter):
            self.put(state_hash({"": tensor}))

    def _code(self, code: types.CodeType) -> None:
        self.put(code.co_code, code.co_names, code.co_freevars, code.co_exceptiontable)
        for constant in code.co_consts:
            self.feed(constant)

    def _function(self, function: types.FunctionType) -> None:
        if not self._is_own(function.__module__):
            self.put(function.__module__, function.__qualname__)
            return
        code = function.__code__
        if function.__doc__ is not None and code.co_consts[:1] == (function.__doc__,):
            code = code.replace(co_consts=(None, *code.co_consts[1:]))
        self._code(code)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        self.feed((function.__defaults__, function.__kwdefaults__, cells))
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self._named(name, function.__globals__[name], function.__code__)

    def _named(self, name: str, value: Any, code: types.CodeType) -> None:
        """A global that a function mentions."""
        if isinstance(value, types.ModuleType):
            if self._is_own(value.__name__):
                for inner in sorted(_names(code) & vars(value).keys()):
                    if not isinstance(vars(value)[inner], types.ModuleType):
                        self._named(inner, vars(value)[inner], code)
        elif self._is_own(type(value).__module__) and not isinstance(value, nn.Module):
            self.put(name, type(value).__qualname__)  # such as a log: it changes while the code does not
        else:
            self.put(name)
            self.feed(value)

    def _class(self, cls: type) -> None:
        self.put(cls.__module__ if not self._is_own(cls.__module__) else "", cls.__qualname__)
        for base in cls.__mro__:
            if not self._is_own(base.__module__):
                self.put(base.__module__, base.__qualname__)
                continue
            for name, value in sorted(vars(base).items()):
                if name.startswith("__") and (not isinstance(value, types.FunctionType) or _is_generated(value)):
                    continue
                if name != "_abc_impl":
                    self.put(name)
                    self.feed(value)

    def _module(self, module: nn.Module) -> None:
        self.feed(type(module))
        text = getattr(module, "code", None)  # of TorchScript and torch.fx
        self.put(text if isinstance(text, str) else None)
        self.feed({name: value for name, value in sorted(vars(module).items()) if name not in _BARE})
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in tensors:
            self.put(name, tuple(tensor.shape))
            if self.weights:
                self.feed(tensor)
        for name, child in module.named_children():
            self.put(name)
            self.feed(child)

    def _is_own(self, module: str | None) -> bool:
        root = _root(module)
        if root in self.roots:
            return True
        file = getattr(sys.modules.get(root), "__file__", None) or ""
        installed = "site-packages" in file or "dist-packages" in file
        return not (root == "rayfed" or root in sys.stdlib_module_names or installed)


def _shown(thing: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_generated(function: types.FunctionType) -> bool:
    """Whether a dataclass wrote it; what is in it follows from the fields."""
    return function.__code__.co_filename.endswith(("<string>", "dataclasses.py"))
