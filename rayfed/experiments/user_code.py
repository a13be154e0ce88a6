"""The user's own code in an experiment: its names and hashes, and which modules other machines need.

A module is the user's own if its file belongs neither to rayfed, nor to Python, nor to an installed package.
"""

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import operator
import re
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rayfed.core.errors import is_user_file, is_user_module
from rayfed.core.registry import ModuleSource
from rayfed.core.trees import state_hash
from rayfed.experiments.config import Config
from rayfed.metrics import PREFIX


def own_names(config: Config) -> list[str]:
    """Return the components that `config` names as module:Name outside rayfed."""
    names = []
    for component in config.components:
        name = component.name or ""
        if ":" in name and not name.startswith(("rayfed.", PREFIX)):
            names.append(name)
    return names


class OwnCode(NamedTuple):
    """The user's own code in an experiment.

    Attributes:
        digest: A hash of it; None without any.
        sources: The modules that it is in.
        incomparable: The globals that it reads and that the hash does not cover.
    """

    digest: str | None
    sources: tuple[ModuleSource, ...]
    incomparable: tuple[str, ...]


def own_code(names: Iterable[str], model: Any, loss: Any, clients: Any) -> OwnCode:
    """Return the user's own code in an experiment.

    The modules are those that `names` name as module:Name, those from which the things given in Python come, and those
    that these import; parents come before children. The hash covers their sources, comments included, and the values
    of the globals that they read. Of `__main__`, a script or a notebook, it covers what `object_hash` does.
    """
    met: dict[int, Any] = {}
    make = getattr(clients, "make", None)
    named = list(map(_imported, names))
    digest = object_hash(model, loss, make, named, weights=False, met=met)
    modules = [name.partition(":")[0] for name in names]
    for thing in met.values():
        modules += _modules_of(thing)
    found = _sources_of(modules)
    texts = [(source.name, source.text) for source in found]
    whole = None
    if found or "__main__" in modules:
        whole = object_hash(digest, texts)
    return OwnCode(whole, found, tuple(incomparable_globals(met.values())))


def _modules_of(thing: Any) -> list[str]:
    """Return the modules that bytecode imports, or the module in which a function or a class is."""
    if isinstance(thing, types.CodeType):
        steps = dis.get_instructions(thing)
        return [step.argval for step in steps if step.opname == "IMPORT_NAME"]
    if isinstance(thing, _CODE):
        return [getattr(thing, "__module__", None) or thing.__name__]
    return []


def _sources_of(modules: Iterable[str]) -> tuple[ModuleSource, ...]:
    """Return the sources of those of `modules` that are the user's.

    The packages around them and the modules that they import are added. All are ordered by name, so that parents come
    before children.
    """
    sources: dict[str, ModuleSource | None] = {"": None, "__main__": None}
    pending = list(modules)
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        source = _source(name)
        sources[name] = source
        pending.append(name.rpartition(".")[0])
        if source is not None:
            pending += _imports(source)
    return tuple(source for _, source in sorted(sources.items()) if source)


def _imported(name: str) -> Any:
    """Return the object of a name module:Name, None if it cannot be imported, which other checks say."""
    module, _, path = name.partition(":")
    with contextlib.suppress(Exception):
        return operator.attrgetter(path)(importlib.import_module(module))
    return None


def _imports(source: ModuleSource) -> Iterator[str]:
    """Yield the names that a module imports, also inside functions. Some are attributes of modules."""
    package = source.name.split(".")
    if not source.is_package:
        package.pop()
    for node in ast.walk(ast.parse(source.text)):
        above = []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                above = package[: len(package) + 1 - node.level]
            if node.module:
                above = [*above, node.module]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield ".".join([*above, alias.name])


_SOURCES: dict[str, tuple[Any, ModuleSource]] = {}
"""The sources that were read, with the spec of the import: a file edited after its import counts as it was."""


def _source(name: str) -> ModuleSource | None:
    """Return the source of a module of the user's own, None without one. The packages around it are imported."""
    with contextlib.suppress(Exception):  # of names without a module, and packages that cannot be imported
        spec: Any = None
        if is_user_module(name):
            spec = importlib.util.find_spec(name)
        if name not in _SOURCES or _SOURCES[name][0] is not spec:
            _SOURCES[name] = spec, _read(name, spec)
        return _SOURCES[name][1]
    return None


def _read(name: str, spec: Any) -> ModuleSource:
    folders = spec.submodule_search_locations
    is_package = folders is not None
    if not spec.origin:  # a package may go without the file `__init__.py`
        return ModuleSource(name, f"{folders[0]}/__init__.py", is_package, "")
    text = importlib.util.decode_source(spec.loader.get_data(spec.origin))
    return ModuleSource(name, spec.origin, is_package, text)


def display_name(given: Any, built: Any) -> str:
    """Return the name in the tables of a loss, or of a model and what was built from it, such as "own:Net-1a2b3c"."""
    if built is given or isinstance(given, nn.Module):
        digest = object_hash(built)
    else:  # of a function that makes the model, so that its weights follow from the seed
        digest = object_hash(given, built, weights=False)
    named = given
    if not hasattr(given, "__qualname__"):
        named = type(given)
    name = named.__qualname__.rpartition("<locals>.")[2]
    name = name.replace("<lambda>", "lambda")
    return f"own:{name}-{digest[:6]}"


_BARE = frozenset(vars(nn.Module()))
_CODE = (types.FunctionType, types.ModuleType, type)
_WRAPPERS = (staticmethod, classmethod, property, types.MethodType, functools.partial, functools.cached_property)
_SHOWN_WHOLE = frozenset(("builtins", "torch", "datetime", "pathlib", "enum", "re", "decimal", "fractions", "types"))
"""The modules whose objects without parts have all of their values in their `repr`."""
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")


def object_hash(*things: Any, weights: bool = True, everywhere: bool = False, met: dict[int, Any] | None = None) -> str:
    """Return a hash of the names of objects, the bytecode of the user's functions, and the values in all of them.

    Functions of the user's count with the globals that they read: functions, classes and values. With `weights=False`,
    only the shapes of parameters and buffers count. Attributes count of objects of the user's classes, or `everywhere`:
    those of libraries may differ between processes. Compound objects are put into `met`, by their ids.
    """
    digest = hashlib.blake2b(digest_size=16)
    seen: dict[int, Any] = {}
    if met is not None:
        seen = met

    def feed(thing: Any) -> None:
        value = _value(thing)
        digest.update(repr((type(thing).__name__, value)).encode())
        if value is None and id(thing) not in seen:
            seen[id(thing)] = thing  # which keeps it, so that no id comes twice
            for part in _parts(thing, weights, everywhere):
                feed(part)
            if isinstance(thing, (tuple, list, dict)):
                del seen[id(thing)]  # only cycles count as seen, because equal constants may be one object

    feed(things)
    return digest.hexdigest()


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of a tensor, None for that of a lazy layer, which has none yet."""
    if is_lazy(tensor):
        return None
    return tuple(tensor.shape)


def _value(thing: Any) -> Any:
    """Return what a thing without parts holds, None for a compound object."""
    if type(thing) in weakref.ProxyTypes:  # which pass for what they refer to
        return "weak reference"
    if isinstance(thing, (bool, int, float, complex, str, bytes)):
        return thing
    if isinstance(thing, (np.ndarray, np.generic)) and not thing.dtype.hasobject:
        return thing.dtype.str, thing.shape, thing.tobytes()
    if isinstance(thing, torch.Tensor):
        return state_hash({"": thing})
    return None


def globals_read(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the globals that a user's function reads, with their names: functions, classes and values.

    Of a module of the user's, they are the attributes that the function reads.
    """
    found: dict[str, Any] = {}
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        attributes = {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
        for step in steps:
            name = step.argval
            if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or name not in function.__globals__:
                continue
            value = function.__globals__[name]
            found[name] = value
            if isinstance(value, types.ModuleType) and is_user_module(value.__name__):
                for attribute in attributes.intersection(vars(value)):
                    found[f"{name}.{attribute}"] = vars(value)[attribute]
    return sorted(found.items(), key=lambda item: item[0])


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Return the bytecode of a function, and of all functions inside it."""
    codes = [code]
    for outer in codes:
        for inner in outer.co_consts:
            if isinstance(inner, types.CodeType):
                codes.append(inner)
    return codes


def incomparable_globals(met: Iterable[Any]) -> list[str]:
    """Return the globals that functions among `met` read, and whose changes no hash can notice."""
    found: dict[str, None] = {}
    for thing in met:
        if not isinstance(thing, types.FunctionType) or not is_user_file(thing.__code__.co_filename):
            continue
        for name, value in globals_read(thing):
            if not _is_comparable(value):
                found[f"{name} ({type(value).__name__})"] = None
    return list(found)


def _is_comparable(value: Any) -> bool:
    """Return whether `object_hash` notices a change of a value; of containers, whether it notices that of each part."""
    if isinstance(value, Mapping):
        return all(map(_is_comparable, value.values()))
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return all(map(_is_comparable, value))
    if isinstance(value, (*_CODE, *_WRAPPERS, nn.Module)) or callable(value) or _value(value) is not None:
        return True
    kind = type(value)
    if is_user_module(kind.__module__):
        with contextlib.suppress(Exception):  # as in `_parts`
            value.__reduce_ex__(4)
            return True
    return kind.__module__.partition(".")[0] in _SHOWN_WHOLE and " at 0x" not in repr(value)


def _parts(thing: Any, weights: bool, everywhere: bool) -> Iterable[Any]:
    """Return what makes up a compound object."""
    if isinstance(thing, Mapping):
        return thing.items()
    if isinstance(thing, (tuple, list, deque)):
        return [len(thing), *thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(map(repr, thing))
    if isinstance(thing, types.CodeType):
        return thing.co_code, thing.co_names, thing.co_freevars, thing.co_exceptiontable, thing.co_consts
    if isinstance(thing, types.FunctionType):
        return _parts_of_function(thing)
    if isinstance(thing, type):
        return _parts_of_class(thing)
    if isinstance(thing, types.ModuleType):
        return [thing.__name__]
    if isinstance(thing, nn.Module):
        return _parts_of_module(thing, weights)
    if isinstance(thing, _WRAPPERS) or hasattr(thing, "__wrapped__"):
        return [getattr(thing, name) for name in _WRAPPED if hasattr(thing, name)]
    if everywhere or is_user_module(type(thing).__module__):
        with contextlib.suppress(Exception):  # of what no process can send, such as open files
            return [*thing.__reduce_ex__(4)]
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
    return type(thing).__module__, type(thing).__qualname__, text


def _parts_of_function(function: types.FunctionType) -> Iterable[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = function.__defaults__, function.__kwdefaults__, cells
    if not is_user_file(function.__code__.co_filename):
        return function.__module__, function.__qualname__, *values
    return function.__module__, function.__qualname__, function.__code__, globals_read(function), *values


def _parts_of_class(kind: type) -> Iterable[Any]:
    """Return the names of a class and its bases, and what the user's among them define."""
    parts: list[Any] = [(base.__module__, base.__qualname__) for base in kind.__mro__]
    for base in kind.__mro__:
        if not is_user_module(base.__module__):
            continue
        for name, value in sorted(vars(base).items()):
            if name[:2] != "__" or isinstance(value, types.FunctionType):
                parts.append((name, value))
    return parts


def _parts_of_module(module: nn.Module, weights: bool) -> Iterable[Any]:
    """Return what makes up a layer: its class, code, attributes, weights or their shapes, and the layers in it."""
    state: list[tuple[str, Any]] = []
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if weights:
            state.append((name, tensor))
        else:
            state.append((name, _shape(tensor)))
    text = getattr(module, "code", None)  # of TorchScript and torch.fx
    if not isinstance(text, str):
        text = None
    own = sorted((name, value) for name, value in vars(module).items() if name not in _BARE)
    return type(module), text, own, state, list(module.named_children())
