"""The user's own code in an experiment: its names and hashes, and which modules other machines need.

A module is the user's own if its file belongs neither to rayfed, nor to Python, nor to an installed package.

- `code_hash` covers the sources of the user's modules from which objects come, and of those that these import, comments
  included; of `__main__`, a script or a notebook, the bytecode of the functions and classes that the objects use. The
  values of globals do not count. `resume=true` refuses to continue if it has changed.
- `object_hash` tells objects given in Python apart ("own:Net-1a2b3c"): by their names and modules, the bytecode of
  their functions, and the values in closures, defaults, attributes and tensors.
"""

import ast
import enum
import functools
import hashlib
import importlib.util
import random
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.core.errors import UsageError, is_user_file
from rayfed.core.registry import ModuleSource, resolve
from rayfed.data.user_clients import Clients
from rayfed.engine.serialization import state_hash
from rayfed.experiments.config import Config
from rayfed.metrics import PREFIX
from rayfed.records.trials import recorded_value


def is_user_module(name: str | None) -> bool:
    """Return whether the module `name`, which is loaded, is the user's own; `__main__` always is."""
    file = _file(name) or _file((name or "").partition(".")[0])
    return name == "__main__" or (file is not None and is_user_file(file))


def _file(name: str | None) -> str | None:
    """Return the file or folder of a loaded module, None for a module without one."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file if isinstance(file, str) else None


def loaded_user_modules() -> list[types.ModuleType]:
    """Return all loaded modules of the user's own that have a file or a folder, except `__main__`."""
    loaded = [(name, module) for name, module in list(sys.modules.items()) if name != "__main__"]
    return [module for name, module in loaded if getattr(module, "__name__", None) == name and is_user_module(name)]


def named_objects(config: Config) -> dict[str, Any]:
    """Return the components that `config` names as module:Name outside rayfed, by that name."""
    names, ours = [component.name or "" for component in config.components], ("rayfed.", PREFIX)
    return {name: resolve(name, {}, where="name") for name in names if ":" in name and not name.startswith(ours)}


def given_objects(model: Any, loss: Any, clients: Iterable[Any] | Clients | None) -> dict[str, Any]:
    """Return what was given in Python, by keyword; of clients the function that makes them, if there is one."""
    make = clients.make if isinstance(clients, Clients) else None
    given = {"model=": model, "loss=": loss, "clients=": make}
    return {key: value for key, value in given.items() if value is not None}


def display_name(thing: Any, digest: str) -> str:
    """Return the name of a user's model or loss in the tables, such as "own:Net-1a2b3c"."""
    name = thing.__qualname__ if hasattr(thing, "__qualname__") else type(thing).__qualname__
    return f"own:{name.rpartition('<locals>.')[2].replace('<lambda>', 'lambda')}-{digest[:6]}"


def object_hash(*things: Any, weights: bool = True, everywhere: bool = False) -> str:
    """Return a hash of what `things` do and hold; see `_Walk`."""
    walk = _Walk(weights=weights, everywhere=everywhere)
    walk.feed(things)
    return walk.digest.hexdigest()


def model_hash(given: Any, built: nn.Module) -> str:
    """Return a hash of the user's model. The weights that a factory draws do not count: they follow from the seed."""
    return object_hash(built) if isinstance(given, nn.Module) else object_hash(given, built, weights=False)


def code_hash(objects: Mapping[str, Any]) -> str | None:
    """Return a hash of all code of the user's own that `objects` use, or None if they use none."""
    walk, sources = _walked(objects), module_sources(objects)
    walk.digest.update(repr([(source.name, source.text) for source in sources]).encode())
    return walk.digest.hexdigest() if walk.modules or sources else None


def check_resumed(config: Config, trial: str, code: str | None, base: str | None) -> None:
    """Raise UsageError if `config` resumes `trial`, which had other code or a model of other frozen weights."""
    for column, now in (("code_hash", code if config.resume is True else None), ("base_hash", base)):
        before = recorded_value(config.results, config.experiment, trial, column) if config.resume else None
        if before is not None and before != now and (now is not None or column == "base_hash"):
            what = "your own code" if column == "code_hash" else "the frozen weights of the model"
            anyway = "resume=anyway if only comments did, " if column == "code_hash" else "the same weights, "
            raise UsageError(
                f"resume={str(config.resume).lower()}: {what} changed since {trial} ran; give {anyway}another "
                "experiment, or resume=false"
            )


def module_sources(objects: Mapping[str, Any]) -> list[ModuleSource]:
    """Return the user's modules from which `objects` come, and those that they import, parents before children.

    `__main__` and modules without Python source are left out.
    """
    sources: dict[str, ModuleSource | None] = {"": None, "__main__": None}
    pending = [*(key.partition(":")[0] for key in objects if ":" in key), *_walked(objects).modules]
    while pending:
        if (name := pending.pop()) not in sources:
            sources[name] = source = _source(name)
            pending += [name.rpartition(".")[0], *(_imports(source) if source else ())]
    return [source for _, source in sorted(sources.items()) if source is not None]


def _walked(objects: Mapping[str, Any]) -> "_Walk":
    """Return a walk over the objects that were given in Python."""
    walk = _Walk(weights=False)
    walk.feed([thing for key, thing in objects.items() if ":" not in key])
    return walk


def _imports(source: ModuleSource) -> Iterator[str]:
    """Yield the names that a module imports, also inside functions. Some are attributes of modules."""
    package = source.name.split(".") if source.is_package else source.name.split(".")[:-1]
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


_SOURCES: dict[str, tuple[Any, ModuleSource | None]] = {}
"""The sources that were read, with the spec of the import: a file edited after its import counts as it was."""


def _source(name: str) -> ModuleSource | None:
    """Return the source of a module of the user's own, None without one. The packages around it are imported."""
    try:
        root = importlib.util.find_spec(name.partition(".")[0])
        if root is None or not is_user_file(root.origin or next(iter(root.submodule_search_locations or ()))):
            return None
        spec: Any = importlib.util.find_spec(name)
        if name not in _SOURCES or _SOURCES[name][0] is not spec:
            is_package, file = spec.submodule_search_locations is not None, Path(spec.origin or "")
            is_file = file.suffix == ".py" and file.is_file()  # whose loader may tell no source, as pytest's
            text = importlib.util.decode_source(file.read_bytes()) if is_file else spec.loader.get_source(name)
            source = None if text is None else ModuleSource(name, str(file), is_package, text)
            _SOURCES[name] = spec, source
    except Exception:  # a name of no module, or a package that cannot be imported
        return None
    return _SOURCES[name][1]


_BARE = frozenset(vars(nn.Module()))
_WRAPPERS = (staticmethod, classmethod, property, types.MethodType, functools.partial, functools.cached_property)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")


class _Walk:
    """A hash of objects: of their names and values, and of the bytecode of the user's functions.

    `modules` are those that the user's code comes from or mentions. The values of parameters and buffers count if
    `weights` is true, otherwise only their shapes do. Attributes count of objects of the user's classes, or of all
    objects if `everywhere` is true: those of libraries may differ between processes.
    """

    def __init__(self, *, weights: bool = True, everywhere: bool = False) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.modules: set[str] = set()
        self._weights, self._everywhere = weights, everywhere
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no id comes twice

    def feed(self, thing: Any) -> None:
        value = _value(thing)
        self.digest.update(repr((type(thing).__name__, value)).encode())
        if value is None and id(thing) not in self._seen:
            self._seen[id(thing)] = thing
            for part in self._parts(thing):
                self.feed(part)
            if isinstance(thing, (tuple, list, dict)):
                del self._seen[id(thing)]  # only cycles count as seen, because equal constants may be one object

    def _parts(self, thing: Any) -> Iterable[Any]:
        """Return what makes up a compound object."""
        if isinstance(thing, Mapping):
            return thing.items()
        if isinstance(thing, (tuple, list, deque)):
            return [len(thing), *thing]
        if isinstance(thing, (set, frozenset)):
            return sorted(map(_shown, thing))
        if isinstance(thing, types.CodeType):
            return thing.co_code, thing.co_names, thing.co_freevars, thing.co_exceptiontable, thing.co_consts
        if isinstance(thing, types.FunctionType):
            # A function that `exec` made in an empty namespace claims to be of builtins.
            module = "__main__" if thing.__module__ in (None, "builtins") else thing.__module__
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
            code = thing.__code__ if self._meets(module) else None
            mentioned = self._mentioned(thing) if module == "__main__" else []
            return module, thing.__qualname__, code, mentioned, thing.__defaults__, thing.__kwdefaults__, cells
        if isinstance(thing, type):
            names = [(base.__module__, base.__qualname__) for base in thing.__mro__]
            items = [
                item for base in thing.__mro__ if self._meets(base.__module__) for item in sorted(vars(base).items())
            ]
            return names + [(k, v) for k, v in items if k[:2] != "__" or isinstance(v, types.FunctionType)]
        if isinstance(thing, nn.Module):
            tensors = (*thing.named_parameters(recurse=False), *thing.named_buffers(recurse=False))
            state = [(name, tensor if self._weights else tuple(tensor.shape)) for name, tensor in tensors]
            text = getattr(thing, "code", None)  # of TorchScript and torch.fx
            own = sorted((name, value) for name, value in vars(thing).items() if name not in _BARE)
            return type(thing), text if isinstance(text, str) else None, own, state, list(thing.named_children())
        if isinstance(thing, _WRAPPERS) or hasattr(thing, "__wrapped__"):
            return [getattr(thing, name) for name in _WRAPPED if hasattr(thing, name)]
        is_open = self._everywhere or is_user_module(type(thing).__module__)
        if is_open and hasattr(thing, "__dict__") and not isinstance(thing, (enum.Enum, types.ModuleType)):
            return type(thing), sorted(vars(thing).items())
        return type(thing).__module__, type(thing).__qualname__, _shown(thing)

    def _mentioned(self, function: types.FunctionType) -> list[Any]:
        """Return the functions and classes that a function of `__main__` uses, and note the modules that it uses."""
        names, codes = set[str](), [function.__code__]
        for code in codes:  # those of the functions inside it, too
            names |= {*code.co_names}
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        values = [function.__globals__[name] for name in sorted(names) if name in function.__globals__]
        self.modules |= names | {value.__name__ for value in values if isinstance(value, types.ModuleType)}
        return [value for value in values if isinstance(value, (types.FunctionType, type))]

    def _meets(self, module: str) -> bool:
        """Return whether `module` is the user's own, and note it if so."""
        is_users = is_user_module(module)
        self.modules |= {module} if is_users else set()
        return is_users


def _value(thing: Any) -> Any:
    """Return what a thing without parts holds, None for a compound object."""
    if isinstance(thing, (bool, int, float, complex, str, bytes)):
        return thing
    if isinstance(thing, torch.Tensor):
        return state_hash({"": thing})
    if isinstance(thing, (np.ndarray, np.generic)) and not thing.dtype.hasobject:
        return thing.dtype.str, thing.shape, thing.tobytes()
    if isinstance(thing, torch.Generator):
        return state_hash({"": thing.get_state()})
    if isinstance(thing, np.random.Generator):
        return repr(thing.bit_generator.state)
    return thing.getstate() if isinstance(thing, random.Random) else None


def _shown(thing: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
