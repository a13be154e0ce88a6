"""The user's own code in an experiment: its names and hashes, and which modules other machines need.

A module is the user's own if its file belongs neither to rayfed, nor to Python, nor to an installed package.
"""

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
    names = [component.name or "" for component in config.components]
    return [name for name in names if ":" in name and not name.startswith(("rayfed.", PREFIX))]


def own_code(names: Iterable[str], model: Any, loss: Any, clients: Any) -> tuple[str | None, tuple[ModuleSource, ...]]:
    """Return a hash of the user's own code in an experiment, None without any, and the modules that it is in.

    The modules are those that `names` name as module:Name, those from which the things given in Python come, and those
    that these import; parents come before children. The hash covers their sources, comments included. Of `__main__`, a
    script or a notebook, it covers what `object_hash` does.
    """
    met, make = dict[int, Any](), getattr(clients, "make", None)
    digest, pending = object_hash(model, loss, make, weights=False, met=met), [name.partition(":")[0] for name in names]
    for thing in met.values():
        if isinstance(thing, types.CodeType):
            pending += [step.argval for step in dis.get_instructions(thing) if step.opname == "IMPORT_NAME"]
        elif isinstance(thing, _CODE):
            pending.append(getattr(thing, "__module__", None) or thing.__name__)
    is_main, sources = "__main__" in pending, dict[str, ModuleSource | None]({"": None, "__main__": None})
    while pending:
        if (name := pending.pop()) not in sources:
            sources[name] = source = _source(name)
            pending += [name.rpartition(".")[0], *(_imports(source) if source else ())]
    found = tuple(source for _, source in sorted(sources.items()) if source)
    texts = [(source.name, source.text) for source in found]
    return object_hash(digest, texts) if found or is_main else None, found


def _imports(source: ModuleSource) -> Iterator[str]:
    """Yield the names that a module imports, also inside functions. Some are attributes of modules."""
    package = source.name.split(".") if source.is_package else source.name.split(".")[:-1]
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            level, module = getattr(node, "level", 0), getattr(node, "module", None)
            above = package[: len(package) + 1 - level] if level else []
            yield from (".".join([*above, *filter(None, [module]), alias.name]) for alias in node.names)


_SOURCES: dict[str, tuple[Any, ModuleSource]] = {}
"""The sources that were read, with the spec of the import: a file edited after its import counts as it was."""


def _source(name: str) -> ModuleSource | None:
    """Return the source of a module of the user's own, None without one. The packages around it are imported."""
    with contextlib.suppress(Exception):  # of names without a module, and packages that cannot be imported
        spec: Any = importlib.util.find_spec(name) if is_user_module(name) else None
        if name not in _SOURCES or _SOURCES[name][0] is not spec:
            folders = spec.submodule_search_locations
            file = spec.origin or f"{folders[0]}/__init__.py"  # a package may go without that file
            text = importlib.util.decode_source(spec.loader.get_data(file)) if spec.origin else ""
            _SOURCES[name] = spec, ModuleSource(name, file, folders is not None, text)
        return _SOURCES[name][1]
    return None


def display_name(given: Any, built: Any) -> str:
    """Return the name in the tables of a loss, or of a model and what was built from it, such as "own:Net-1a2b3c"."""
    is_factory = built is not given and not isinstance(given, nn.Module)  # whose weights follow from the seed
    digest = object_hash(given, built, weights=False) if is_factory else object_hash(built)
    name = given.__qualname__ if hasattr(given, "__qualname__") else type(given).__qualname__
    return f"own:{name.rpartition('<locals>.')[2].replace('<lambda>', 'lambda')}-{digest[:6]}"


_BARE = frozenset(vars(nn.Module()))
_CODE = (types.FunctionType, types.ModuleType, type)
_WRAPPERS = (staticmethod, classmethod, property, types.MethodType, functools.partial, functools.cached_property)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")


def object_hash(*things: Any, weights: bool = True, everywhere: bool = False, met: dict[int, Any] | None = None) -> str:
    """Return a hash of the names of objects, the bytecode of the user's functions, and the values in all of them.

    Functions of `__main__` count with the functions and classes that they use, but not with the values of globals.
    With `weights=False`, only the shapes of parameters and buffers count. Attributes count of objects of the user's
    classes, or `everywhere`: those of libraries may differ between processes. Compound objects are put into `met`, by
    their ids.
    """
    digest, seen = hashlib.blake2b(digest_size=16), {} if met is None else met

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
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _value(thing: Any) -> Any:
    """Return what a thing without parts holds, None for a compound object."""
    if isinstance(thing, (bool, int, float, complex, str, bytes)):
        return thing
    if isinstance(thing, (np.ndarray, np.generic)) and not thing.dtype.hasobject:
        return thing.dtype.str, thing.shape, thing.tobytes()
    return state_hash({"": thing}) if isinstance(thing, torch.Tensor) else None


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
        codes = [thing.__code__] if thing.__module__ == "__main__" else []
        for code in codes:  # those of the functions inside it, too
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        names = sorted({name for code in codes for name in code.co_names})
        used = [value for name in names if isinstance(value := thing.__globals__.get(name), _CODE)]
        bytecode = thing.__code__ if is_user_file(thing.__code__.co_filename) else None
        values = thing.__defaults__, thing.__kwdefaults__, [cell.cell_contents for cell in thing.__closure__ or ()]
        return thing.__module__, thing.__qualname__, bytecode, used, *values
    if isinstance(thing, type):
        users = [base for base in thing.__mro__ if is_user_module(base.__module__)]
        items = [item for base in users for item in sorted(vars(base).items())]
        bases = [(base.__module__, base.__qualname__) for base in thing.__mro__]
        return bases + [(k, v) for k, v in items if k[:2] != "__" or isinstance(v, types.FunctionType)]
    if isinstance(thing, types.ModuleType):
        return [thing.__name__]
    if isinstance(thing, nn.Module):
        tensors = (*thing.named_parameters(recurse=False), *thing.named_buffers(recurse=False))
        state = [(name, tensor if weights else _shape(tensor)) for name, tensor in tensors]
        text = getattr(thing, "code", None)  # of TorchScript and torch.fx
        own = sorted((name, value) for name, value in vars(thing).items() if name not in _BARE)
        return type(thing), text if isinstance(text, str) else None, own, state, list(thing.named_children())
    if isinstance(thing, _WRAPPERS) or hasattr(thing, "__wrapped__"):
        return [getattr(thing, name) for name in _WRAPPED if hasattr(thing, name)]
    if everywhere or is_user_module(type(thing).__module__):
        with contextlib.suppress(Exception):  # of what no process can send, such as open files
            return [*thing.__reduce_ex__(4)]
    return type(thing).__module__, type(thing).__qualname__, re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
