"""The user's own code in an experiment: what it is, its names and hashes, and which modules other machines need.

A module is the user's own if its file belongs neither to rayfed, nor to Python's standard library, nor to an installed
package; `__main__` always is. An installed package that the configuration names (`model.name=package:Net`) counts for
hashing as well.

Two hashes are taken, both of the abstract syntax tree of the source, so that comments, docstrings, formatting and the
version of Python do not matter:

- `object_hash` follows an object: the source of its functions and classes, the functions, classes and values that
  they mention by a global name, and the values in closures, attributes and tensors. It names models and losses given
  in Python ("own:Net-1a2b3c").
- `code_hash` takes in, besides, the whole source of the user's modules that are met on the way and of the user's
  modules that these import. `resume=true` refuses to continue if it has changed. Of `__main__`, a script or a
  notebook, only what the objects use counts, so that the line with `rounds=5` in it may change.

Source is read once per import of a module, so a file edited after it was imported counts as it was. A function without
source (made by `exec`, or typed at the prompt of Python 3.12 or older) counts by its bytecode, and changes its hash
with the version of Python.
"""

import ast
import dataclasses
import enum
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.algorithm import Algorithm
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.core.user_files import is_user_file
from rayfed.engine.serialization import state_hash
from rayfed.experiments.config import Config
from rayfed.records.trials import recorded_value

# What the user's own code is


def is_user_module(name: str | None) -> bool:
    """Return whether the module `name` is the user's own; see the module's text."""
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


# The objects of the user's own in an experiment


def named_objects(config: Config) -> dict[str, Any]:
    """Return what `config` names as module:Name outside rayfed, by that name.

    These are the algorithm and the algorithms inside it, data, partition, model, loss, augmentation, sampler
    and metrics.
    """
    classes = [type(algorithm) for algorithm in _algorithms(config.algorithm)]
    objects: dict[str, Any] = {
        f"{cls.__module__}:{cls.__qualname__}": cls for cls in classes if not cls.__module__.startswith("rayfed.")
    }
    groups = (config.data, config.partition, config.model, config.loss, config.augment, config.sampling)
    chosen = [choice.name for choice in groups]
    for name in (*chosen, *config.metrics):
        if name and ":" in name and not name.startswith("rayfed."):
            objects[name] = resolve(name, {}, where="name")
    return objects


def given_objects(model: Any, loss: Any, clients: Iterable[Any] | None) -> dict[str, Any]:
    """Return what was given in Python, by keyword; of clients the classes, since their contents are the data."""
    types_of_clients = {type(value) for client in (() if clients is None else clients) for value in _parts(client)}
    own = sorted((cls for cls in types_of_clients if is_user_module(cls.__module__)), key=lambda cls: cls.__qualname__)
    given = {"model=": model, "loss=": loss, "clients=": own or None}
    return {key: value for key, value in given.items() if value is not None}


def _algorithms(algorithm: Algorithm) -> Iterator[Algorithm]:
    """Yield `algorithm` and all algorithms inside it."""
    yield algorithm
    for field in dataclasses.fields(algorithm):  # type: ignore[arg-type]
        if isinstance(value := getattr(algorithm, field.name), Algorithm):
            yield from _algorithms(value)


def _parts(client: Any) -> Iterator[Any]:
    """Yield a client, its parts, and their arrays."""
    yield client
    for part in client.values() if isinstance(client, Mapping) else getattr(client, "__dict__", {}).values():
        yield part
        yield from part if isinstance(part, tuple) else getattr(part, "__dict__", {}).values()


# Names, hashes, and the check before a resume


def display_name(thing: Any, digest: str) -> str:
    """Return the name of a user's model or loss in the tables, such as "own:Net-1a2b3c"."""
    name = thing.__qualname__ if hasattr(thing, "__qualname__") else type(thing).__qualname__
    return f"own:{name.rpartition('<locals>.')[2].replace('<lambda>', 'lambda')}-{digest[:6]}"


def object_hash(*things: Any) -> str:
    """Return a hash of what `things` do, the values of weights included."""
    walk = _Walk()
    for thing in things:
        walk.feed(thing)
    return walk.digest.hexdigest()


def model_hash(given: Any, built: nn.Module) -> str:
    """Return a hash of the user's model; with a factory, the weights do not count, since they follow the seed."""
    if isinstance(given, nn.Module):
        return object_hash(built)
    walk = _Walk(weights=False)
    walk.feed(given)
    walk.feed(built)
    return walk.digest.hexdigest()


def code_hash(objects: Mapping[str, Any]) -> str | None:
    """Return a hash of all code of the user's own that `objects` use, or None if they use none."""
    walk = _walked(objects)
    if not walk.modules:
        return None
    for name, source in _reachable(walk.modules, walk.named).items():
        walk.put("module", name, source.digest)
    return walk.digest.hexdigest()


def checked_code_hash(config: Config, trial: str, objects: Mapping[str, Any]) -> str | None:
    """Return `code_hash(objects)`.

    Raises:
        UsageError: `config` resumes `trial`, which was run with other code.
    """
    now = code_hash(objects)
    if now is not None and config.resume:
        before = recorded_value(config.results, config.experiment, trial, "code_hash")
        if before is not None and before != now:
            raise UsageError(
                f"resume=true: {' or '.join(objects)}: its code changed since {trial} ran; give another experiment, "
                "or resume=false"
            )
    return now


@dataclass(frozen=True)
class ModuleSource:
    """The source of a module, as it was imported: enough to import it on a machine without its file."""

    name: str
    file: str
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(_normalised(self.tree).encode(), digest_size=16).hexdigest()

    @cached_property
    def imports(self) -> frozenset[str]:
        return frozenset(_imports(self.tree, self.name if self.is_package else self.name.rpartition(".")[0]))

    @cached_property
    def definitions(self) -> dict[tuple[str, int], list[ast.AST]]:
        return _definitions(self.tree)


def module_sources(objects: Mapping[str, Any]) -> list[ModuleSource]:
    """Return the user's modules from which `objects` come, and those that they import, parents before children."""
    return list(_reachable(_walked(objects).modules).values())


def _walked(objects: Mapping[str, Any]) -> "_Walk":
    """Return a walk over `objects`; of those named module:Name, the package counts as the user's, though installed."""
    named = {key.partition(":")[0].partition(".")[0] for key in objects if ":" in key}
    walk = _Walk(weights=False, named=named)
    for key, thing in objects.items():
        if ":" in key:
            walk.modules.add(key.partition(":")[0])
        walk.feed(thing)
    return walk


# Source


def _reachable(modules: Iterable[str], named: Set[str] = frozenset()) -> dict[str, ModuleSource]:
    """Return the sources of `modules` and of the user's modules that they import, directly or not, sorted by name.

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
        if name.partition(".")[0] in named or is_user_file(spec.origin):
            source = _source(name, spec)
            if source is not None:
                sources[name] = source
                pending += source.imports
    return dict(sorted(sources.items()))


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that `tree` imports, which may be attributes of modules, too; also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module; one that is not loaded is found without running any code.

    `importlib.util.find_spec` would import its parents.
    """
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
    except (ImportError, ValueError, KeyError):  # the last one from namespace packages that are not loaded
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


def _definition(code: types.CodeType, module: str) -> ast.AST | None:
    """Return the node of the function or lambda that was compiled to `code`, None without source."""
    spec = _spec(module) if module and module != "__main__" else None
    source = _source(module, spec) if spec is not None and spec.origin == code.co_filename else None
    if source is not None:
        table = source.definitions
    else:
        linecache.checkcache(code.co_filename)
        table = _definitions_in("".join(linecache.getlines(code.co_filename)))
    nodes = table.get((code.co_name, code.co_firstlineno), [])
    if len(nodes) > 1:  # several lambdas that begin in one line: the innermost one that holds all instructions
        spans = [(p[0], p[2]) for p in code.co_positions() if None not in p and p[2] != p[3]]
        nodes = [node for node in nodes if all(_span(node)[0] <= place <= _span(node)[1] for place in spans)]
        nodes = sorted(nodes, key=lambda node: _span(node)[0], reverse=True)
    return nodes[0] if nodes else None


@functools.lru_cache(maxsize=64)
def _definitions_in(text: str) -> dict[tuple[str, int], list[ast.AST]]:
    try:
        return _definitions(ast.parse(text))
    except (SyntaxError, ValueError):
        return {}


def _definitions(tree: ast.AST) -> dict[tuple[str, int], list[ast.AST]]:
    """Return all functions in `tree` by the name and first line of their code objects."""
    table: dict[tuple[str, int], list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            table.setdefault((node.name, line), []).append(node)
        elif isinstance(node, ast.Lambda):
            table.setdefault(("<lambda>", node.lineno), []).append(node)
    return table


def _span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first and last place (line, column) of the body of a lambda."""
    body = getattr(node, "body", node)
    body = node if isinstance(body, list) else body
    return (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)


def _normalised(node: Any) -> str:
    """Return a text of the syntax tree `node` without positions and docstrings, the same in every version of Python.

    `ast.dump` and `ast.unparse` differ between versions.
    """
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in ("ctx", "kind"))
        inner = (f"{name}={_normalised(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({','.join(inner)})"
    if isinstance(node, list):
        return f"[{','.join(_normalised(item) for item in node if not _is_docstring(item))}]"
    return ascii(node)


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# Objects

_BARE = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_UNCOUNTED = ("_abc_impl", "__annotate__", "__annotate_func__")  # in a class: what Python adds, by version


class _Walk:
    """A hash of what functions, classes and objects do; of what is not the user's own, the name counts.

    Attributes:
        digest: The hash so far.
        modules: The modules of the user's that were met, and the names that functions import.
    """

    def __init__(self, *, weights: bool = True, named: Set[str] = frozenset()) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.modules: set[str] = set()
        self.named = frozenset(named) - {"rayfed"}
        self._weights = weights  # whether the values of parameters and buffers count, or only their shapes
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no id comes twice

    def put(self, *texts: Any) -> None:
        self.digest.update(repr(texts).encode())

    def feed(self, thing: Any) -> None:
        if isinstance(thing, _PLAIN):
            self.put(type(thing).__name__, thing)
        elif isinstance(thing, types.CodeType):
            self._bytecode(thing)
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
        elif self._meets(type(thing).__module__) and hasattr(thing, "__dict__") and not isinstance(thing, enum.Enum):
            self.feed(type(thing))
            self.feed(dict(sorted(vars(thing).items())))
        else:
            self.put(type(thing).__module__, type(thing).__qualname__, _shown(thing))

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.put("tensor", str(tensor.dtype), tuple(tensor.shape))
        if self._weights or not isinstance(tensor, nn.Parameter):
            self.put(state_hash({"": tensor}))

    def _bytecode(self, code: types.CodeType) -> None:
        self.put(code.co_code, code.co_names, code.co_freevars, code.co_exceptiontable)
        for constant in code.co_consts:
            self.feed(constant)

    def _function(self, function: types.FunctionType) -> None:
        # A function that `exec` made in an empty namespace says that it is of builtins, which has none in Python.
        module = "__main__" if function.__module__ in (None, "builtins") else function.__module__
        if not self._meets(module):
            self.put(module, function.__qualname__)
            return
        code = function.__code__
        node = _definition(code, module)
        if node is None:
            self._bytecode(code)
        else:
            self.put(_normalised(node))
            self.modules.update(_imports(node, str(function.__globals__.get("__package__") or "")))
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        self.feed((function.__defaults__, function.__kwdefaults__, cells))
        for name in sorted(_names(code)):
            if name in function.__globals__:
                self._global(name, function.__globals__[name], code)

    def _global(self, name: str, value: Any, code: types.CodeType) -> None:
        """Feed a global that a function mentions."""
        if isinstance(value, types.ModuleType):
            if self._meets(value.__name__):
                for inner in sorted(_names(code) & vars(value).keys()):
                    if not isinstance(vars(value)[inner], types.ModuleType):
                        self._global(inner, vars(value)[inner], code)
        elif self._meets(type(value).__module__) and not isinstance(value, nn.Module):
            self.put(name, type(value).__qualname__)  # such as a log: it changes while the code does not
        else:
            self.put(name)
            self.feed(value)

    def _class(self, cls: type) -> None:
        self.put(cls.__module__ if not self._meets(cls.__module__) else "", cls.__qualname__)
        for base in cls.__mro__:
            if not self._meets(base.__module__):
                self.put(base.__module__, base.__qualname__)
                continue
            for name, value in sorted(vars(base).items()):
                if name.startswith("__") and (not isinstance(value, types.FunctionType) or _is_generated(value)):
                    continue
                if name not in _UNCOUNTED:
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
            if self._weights:
                self.feed(tensor)
        for name, child in module.named_children():
            self.put(name)
            self.feed(child)

    def _meets(self, module: str | None) -> bool:
        """Return whether `module` is the user's own, and note it if so."""
        own = (module or "").partition(".")[0] in self.named or is_user_module(module)
        if own and module:
            self.modules.add(module)
        return own


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
    """Return whether a dataclass wrote the function; what is in it follows from the fields."""
    return function.__code__.co_filename.endswith(("<string>", "dataclasses.py", "reprlib.py"))
