"""Copies of modules with the functions in them: `copy.deepcopy` keeps functions, which go on using the originals."""

import copy
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from rayfed.core.errors import is_user_module

M = TypeVar("M", bound=nn.Module)

_CONTAINERS = (list, tuple, set, frozenset, deque)


def copied_with_functions(module: M, memo: dict[int, Any]) -> M:
    """Return a deep copy of `module`; functions in it that use its layers or tensors use those of the copy.

    Such a function has them in its closure or among its defaults: `self.f = lambda x: self.b(self.a(x))`. From Python
    3.14 on, `copy.deepcopy` does not let functions be replaced, and they keep using the originals.

    Args:
        module: The module.
        memo: What takes the place of parts of `module`, by the `id` of the originals; see `copy.deepcopy`.
    """
    twins = []
    for function in _functions_over_parts(module):
        twin = _twin(function)
        twins.append((function, twin))
        memo[id(function)] = twin
    result = copy.deepcopy(module, memo)
    for function, twin in twins:
        twin.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        twin.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        cells = function.__closure__ or ()
        twin_cells = twin.__closure__ or ()
        for cell, own in zip(cells, twin_cells, strict=True):
            own.cell_contents = copy.deepcopy(cell.cell_contents, memo)
    return result


def _functions_over_parts(module: nn.Module) -> list[types.FunctionType]:
    """Return the functions in `module` from which one of its layers or tensors can be reached."""
    parts = set(map(id, (*module.modules(), *module.parameters(), *module.buffers())))
    functions = []
    for thing in _reached([module]):
        if isinstance(thing, types.FunctionType):
            reached = map(id, _reached(_values(thing)))
            if not parts.isdisjoint(reached):
                functions.append(thing)
    return functions


def _twin(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of `function` with an empty closure and no defaults."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    twin.__dict__.update(function.__dict__)
    twin.__qualname__ = function.__qualname__
    twin.__module__ = function.__module__
    return twin


def _reached(start: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects that can be reached from those of `start`, each once."""
    seen: dict[int, Any] = {}
    left = list(start)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # which keeps it, so that no id comes twice
        yield thing
        left += _values(thing)


def _values(thing: Any) -> Iterable[Any]:
    """Return the objects that `thing` holds, as far as a module may use them."""
    if isinstance(thing, Mapping):
        return [*thing.values()]
    if isinstance(thing, _CONTAINERS):
        return thing
    if isinstance(thing, types.FunctionType):
        defaults = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        return [*defaults, *_contents(thing)]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    kind: Any = type(thing)
    if isinstance(thing, nn.Module) or _is_users(kind):
        return [*getattr(thing, "__dict__", {}).values()]
    return ()


@functools.lru_cache(maxsize=1024)
def _is_users(kind: type) -> bool:
    return is_user_module(kind.__module__)


def _contents(function: types.FunctionType) -> Iterator[Any]:
    """Yield what the closure of `function` holds; a name that is not assigned yet has an empty cell."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
