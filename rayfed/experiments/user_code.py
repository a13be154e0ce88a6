"""The user's own code in an experiment: what it is, its names and hashes, and which modules other machines need.

A module is the user's own if its file belongs neither to rayfed, nor to Python's standard library, nor to an installed
package; `__main__` always is. An installed package that the configuration names (`model.name=package:Net`) counts for
hashing as well.

- `code_hash` covers the sources of the user's modules from which objects come, and of the user's modules that these
  import, comments included. `resume=true` refuses to continue if it has changed. Of `__main__`, a script or a notebook,
  it covers the bytecode of the functions and classes that the objects use. So the line with `rounds=5` may change. The
  values of globals do not count.
- `object_hash` tells objects given in Python apart ("own:Net-1a2b3c"): by their names and modules, the bytecode of
  their functions, and the values in closures, defaults, attributes and tensors.

Source is read once per import of a module. A file that is edited after its import counts as it was imported.
"""

import ast
import dis
import enum
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.core.errors import UsageError, is_user_file
from rayfed.core.registry import resolve
from rayfed.data.user_clients import Clients
from rayfed.engine.serialization import state_hash
from rayfed.experiments.config import Config
from rayfed.metrics import PREFIX
from rayfed.records.trials import recorded_value


def is_user_module(name: str | None) -> bool:
    """Return whether the module `name` is the user's own; the text of this module defines it."""
    root = (name or "builtins").partition(".")[0]
    if root == "__main__":
        return True
    if root == "rayfed":
        return False
    file = _file(name) or _file(root)
    return is_user_file(file) if file else root not in sys.stdlib_module_names


def _file(name: str | None) -> str | None:
    """Return the file or folder of a loaded module, None for a module without one."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file if isinstance(file, str) else None


def loaded_user_modules() -> list[types.ModuleType]:
    """Return all loaded modules of the user's own that have a file or a folder, except `__main__`."""
    return [
        module
        for name, module in list(sys.modules.items())
        if getattr(module, "__name__", None) == name != "__main__" and _file(name) and is_user_module(name)
    ]


def named_objects(config: Config) -> dict[str, Any]:
    """Return the components that `config` names as module:Name outside rayfed, by that name."""
    names, ours = [component.name or "" for component in config.components], ("rayfed.", PREFIX)
    return {name: resolve(name, {}, where="name") for name in names if ":" in name and not name.startswith(ours)}


def given_objects(model: Any, loss: Any, clients: Iterable[Any] | Clients | None) -> dict[str, Any]:
    """Return what was given in Python, by keyword; of clients their classes, because their contents are the data."""
    if isinstance(clients, Clients):
        code: Any = clients.make
    else:
        classes = {type(value) for client in (clients if clients is not None else ()) for value in _parts(client)}
        code = sorted((cls for cls in classes if is_user_module(cls.__module__)), key=lambda cls: cls.__qualname__)
    given = {"model=": model, "loss=": loss, "clients=": code or None}
    return {key: value for key, value in given.items() if value is not None}


def _parts(client: Any) -> Iterator[Any]:
    """Yield a client, its parts, and their arrays."""
    yield client
    for part in client.values() if isinstance(client, Mapping) else getattr(client, "__dict__", {}).values():
        yield part
        yield from part if isinstance(part, tuple) else getattr(part, "__dict__", {}).values()


def display_name(thing: Any, digest: str) -> str:
    """Return the name of a user's model or loss in the tables, such as "own:Net-1a2b3c"."""
    name = thing.__qualname__ if hasattr(thing, "__qualname__") else type(thing).__qualname__
    return f"own:{name.rpartition('<locals>.')[2].replace('<lambda>', 'lambda')}-{digest[:6]}"


def object_hash(*things: Any, weights: bool = True) -> str:
    """Return a hash of what `things` do. The values of their weights count if `weights` is true."""
    walk = _Walk(weights=weights)
    for thing in things:
        walk.feed(thing)
    return walk.digest.hexdigest()


def model_hash(given: Any, built: nn.Module) -> str:
    """Return a hash of the user's model. The weights that a factory draws do not count: they follow from the seed."""
    return object_hash(built) if isinstance(given, nn.Module) else object_hash(given, built, weights=False)


def code_hash(objects: Mapping[str, Any]) -> str | None:
    """Return a hash of all code of the user's own that `objects` use, or None if they use none."""
    walk = _walked(objects)
    if not walk.modules:
        return None
    for name, source in _reachable(walk.modules, walk.named).items():
        walk.put("module", name, source.text)
    return walk.digest.hexdigest()


def checked_code_hash(config: Config, trial: str, objects: Mapping[str, Any]) -> str | None:
    """Return `code_hash(objects)`.

    Raises:
        UsageError: `config` resumes `trial`, which was run with other code.
    """
    now = code_hash(objects)
    if now is not None and config.resume is True:
        before = recorded_value(config.results, config.experiment, trial, "code_hash")
        if before is not None and before != now:
            raise UsageError(
                f"resume=true: {' or '.join(objects)}: its code changed since {trial} ran; if only comments did, give "
                "resume=anyway, otherwise another experiment, or resume=false"
            )
    return now


def check_base(config: Config, trial: str, base_hash: str | None) -> None:
    """Raise UsageError if `config` resumes `trial`, which was run with a model of other frozen weights."""
    before = recorded_value(config.results, config.experiment, trial, "base_hash") if config.resume else None
    if before is not None and before != base_hash:
        raise UsageError(
            f"resume={str(config.resume).lower()}: the frozen weights of the model changed since {trial} ran; give the "
            "same weights, another experiment, or resume=false"
        )


@dataclass(frozen=True)
class ModuleSource:
    """The source of a module as it was imported, with which machines without its file import it."""

    name: str
    file: str
    is_package: bool
    text: str


def module_sources(objects: Mapping[str, Any]) -> list[ModuleSource]:
    """Return the user's modules from which `objects` come, and those that they import, parents before children."""
    return list(_reachable(_walked(objects).modules).values())


def _walked(objects: Mapping[str, Any]) -> "_Walk":
    """Return a walk over `objects`. The packages of those named module:Name count as the user's, even if installed."""
    named = {key.partition(":")[0].partition(".")[0] for key in objects if ":" in key}
    walk = _Walk(weights=False, named=named)
    for key, thing in objects.items():
        if ":" in key:
            walk.modules.add(key.partition(":")[0])
        walk.feed(thing)
    return walk


def _reachable(modules: Iterable[str], named: Set[str] = frozenset()) -> dict[str, ModuleSource]:
    """Return the sources of `modules` and of all user's modules that they import, sorted by name.

    Modules of the packages `named` count as the user's. `__main__` and modules without Python source are left out.
    """
    sources: dict[str, ModuleSource] = {}
    seen, pending = {"", "__main__"}, list(modules)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        pending.append(name.rpartition(".")[0])
        spec = _spec(name)
        if spec is None or spec.origin is None:
            continue
        is_users = name.partition(".")[0] in named or is_user_file(spec.origin)
        if is_users and (source := _source(name, spec)) is not None:
            sources[name] = source
            pending += _imports(source)
    return dict(sorted(sources.items()))


def _imports(source: ModuleSource) -> Iterator[str]:
    """Yield the names that a module imports, also inside functions. Some of them are attributes of modules."""
    package = source.name if source.is_package else source.name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module without running its code; `importlib.util.find_spec` would import its parents."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    path: Sequence[str] | None = None
    try:
        if parent := name.rpartition(".")[0]:
            above = _spec(parent)
            if above is None or above.submodule_search_locations is None:
                return None
            path = list(above.submodule_search_locations)
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)
    except (ImportError, ValueError, KeyError):  # KeyError: a namespace package that is not loaded
        return None


_SOURCES: dict[str, tuple[importlib.machinery.ModuleSpec, ModuleSource | None]] = {}


def _source(name: str, spec: importlib.machinery.ModuleSpec) -> ModuleSource | None:
    """Return the source of a module, None if it is not written in Python; read once for each import or reload."""
    if name in _SOURCES and _SOURCES[name][0] is spec:
        return _SOURCES[name][1]
    text, file = None, spec.origin or ""
    try:
        if isinstance(spec.loader, importlib.abc.InspectLoader):
            text = spec.loader.get_source(name)
        elif file.endswith(".py"):  # pytest's loader
            text = importlib.util.decode_source(Path(file).read_bytes())
    except (ImportError, OSError):
        pass
    is_package = spec.submodule_search_locations is not None
    source = None if text is None else ModuleSource(name, file, is_package, text)
    _SOURCES[name] = spec, source
    return source


_BARE = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_WRAPPERS = (staticmethod, classmethod, property, types.MethodType, functools.partial, functools.cached_property)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")


class _Walk:
    """A hash of objects: of their names and values, and of the bytecode of the user's functions.

    `modules` are the user's modules that were met. The values of parameters and buffers count if `weights` is true,
    otherwise only their shapes do. Modules of the packages `named` count as the user's.
    """

    def __init__(self, *, weights: bool = True, named: Set[str] = frozenset()) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.modules: set[str] = set()
        self.named = frozenset(named) - {"rayfed"}
        self._weights = weights
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no id comes twice

    def put(self, *texts: Any) -> None:
        self.digest.update(repr(texts).encode())

    def feed(self, thing: Any) -> None:
        self.put(type(thing).__name__)
        if isinstance(thing, _PLAIN):
            self.put(thing)
        elif isinstance(thing, torch.Tensor):
            self.put(state_hash({"": thing}))
        elif isinstance(thing, (np.ndarray, np.generic)) and not thing.dtype.hasobject:
            self.put(thing.dtype.str, thing.shape, thing.tobytes())
        elif id(thing) not in self._seen:
            self._seen[id(thing)] = thing
            for part in self._parts(thing):
                self.feed(part)
            if isinstance(thing, (tuple, list, dict)):
                del self._seen[id(thing)]  # only cycles count as seen, because equal constants may be one object

    def _parts(self, thing: Any) -> Iterable[Any]:
        """Return what makes up a compound object."""
        if isinstance(thing, Mapping):
            return thing.items()
        if isinstance(thing, (tuple, list)):
            return [len(thing), *thing]
        if isinstance(thing, (set, frozenset)):
            return sorted(map(_shown, thing))
        if isinstance(thing, types.CodeType):
            return thing.co_code, thing.co_names, thing.co_freevars, thing.co_exceptiontable, thing.co_consts
        if isinstance(thing, types.FunctionType):
            return self._of_function(thing)
        if isinstance(thing, type):
            return self._of_class(thing)
        if isinstance(thing, nn.Module):
            return self._of_module(thing)
        if isinstance(thing, _WRAPPERS) or hasattr(thing, "__wrapped__"):
            return [getattr(thing, name) for name in _WRAPPED if hasattr(thing, name)]
        if self._meets(type(thing).__module__) and hasattr(thing, "__dict__") and not isinstance(thing, enum.Enum):
            return type(thing), sorted(vars(thing).items())
        return type(thing).__module__, type(thing).__qualname__, _shown(thing)

    def _of_function(self, function: types.FunctionType) -> Iterable[Any]:
        # A function that `exec` made in an empty namespace claims to be of builtins.
        module = "__main__" if function.__module__ in (None, "builtins") else function.__module__
        code = function.__code__ if self._meets(module) else None
        mentioned = self._mentioned(function) if module == "__main__" else []
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return module, function.__qualname__, code, mentioned, function.__defaults__, function.__kwdefaults__, cells

    def _mentioned(self, function: types.FunctionType) -> list[Any]:
        """Return the functions and classes that a function of `__main__` uses, and note the modules that it uses."""
        codes = list(_codes(function.__code__))
        instructions = (instruction for code in codes for instruction in dis.get_instructions(code))
        for module in {str(one.argval) for one in instructions if one.opname == "IMPORT_NAME"}:
            self._meets(module)
        names = sorted({name for code in codes for name in code.co_names} & function.__globals__.keys())
        values = [function.__globals__[name] for name in names]
        for value in values:
            self._meets(value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__)
        return [value for value in values if isinstance(value, (types.FunctionType, type))]

    def _of_class(self, cls: type) -> Iterable[Any]:
        for base in cls.__mro__:
            yield base.__module__, base.__qualname__
            if self._meets(base.__module__):
                for name, value in sorted(vars(base).items()):
                    if not name.startswith("__") or isinstance(value, types.FunctionType):
                        yield name, value

    def _of_module(self, module: nn.Module) -> Iterable[Any]:
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        state = [(name, tensor if self._weights else tuple(tensor.shape)) for name, tensor in tensors]
        text = getattr(module, "code", None)  # of TorchScript and torch.fx
        own = sorted((name, value) for name, value in vars(module).items() if name not in _BARE)
        return type(module), text if isinstance(text, str) else None, own, state, list(module.named_children())

    def _meets(self, module: str | None) -> bool:
        """Return whether `module` is the user's own, and note it if so."""
        is_users = (module or "").partition(".")[0] in self.named or is_user_module(module)
        if is_users and module:
            self.modules.add(module)
        return is_users


def _shown(thing: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
