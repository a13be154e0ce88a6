"""What can be chosen by name, with its options, known without importing torch.

The classes that declare options also hold the code that uses them, so importing them imports torch, which takes
seconds. A mistyped key and a page of help must not wait for that. The declarations of rayfed's own pieces are therefore
kept in a file in the user's cache folder, which is written when it is first needed, and anew whenever a file of the
package has changed. Where torch is imported anyway, the classes themselves are asked.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import operator
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfed.algorithms import ALGORITHMS
from rayfed.augment import AUGMENTS
from rayfed.core.lr_schedule import SCHEDULES
from rayfed.core.options import is_required
from rayfed.core.registry import resolve
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.losses import LOSSES
from rayfed.metrics import METRICS
from rayfed.models import MODELS
from rayfed.sampling import SAMPLERS

KINDS: Mapping[str, Mapping[str, str]] = {
    "algorithm": ALGORITHMS,
    "data": DATASETS,
    "partition": PARTITIONS,
    "model": MODELS,
    "loss": LOSSES,
    "augment": AUGMENTS,
    "sampling": SAMPLERS,
    "lr_schedule": SCHEDULES,
    "metrics": METRICS,
}
"""The keys under which something is chosen by name, each with its registry."""

ALGORITHM = "algorithm"
"""The type of an option that is itself an algorithm, such as the `base` of a wrapper."""

_PACKAGE = Path(__file__).parents[1]
_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
    "list[int]": list[int],
    "list[float]": list[float],
    "list[str]": list[str],
    "dict[str, Any]": dict[str, Any],
    ALGORITHM: Any,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing that can be chosen by name.

    Attributes:
        summary: Its paper, or the first line of its description.
        declaration: A dataclass with its options: the class itself, or one that declares the same.
        nested: The options that are algorithms themselves.
        default_partition: The partition that a dataset has by default; None where that depends on its options.
    """

    summary: str
    declaration: type
    nested: tuple[str, ...] = ()
    default_partition: str | None = "domains"


def entry(kind: str, name: str) -> Entry:
    """Return the entry of a name: from its class if torch is imported or the class is the user's own, else as cached.

    Raises:
        UsageError: There is no such name.
    """
    if "torch" not in sys.modules and name in KINDS[kind]:
        return _stored(kind, name)
    cls = resolve(name, KINDS[kind], where=f"{kind}.name")
    return Entry(_summary(kind, cls), cls, _nested(cls), _default_partition(cls))


# The cache


@functools.cache
def _cached() -> dict[str, Any]:
    """Return the values of all entries by kind and name, from the cache if it is that of this very package."""
    file, version = _cache_file(), _package_version()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] == version:
            return dict(content["entries"])
    entries = {kind: {name: _values(kind, name) for name in table} for kind, table in KINDS.items()}
    entries = json.loads(json.dumps(entries))
    with contextlib.suppress(OSError):  # without a folder to write to, it is made each time
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"version": version, "entries": entries}), encoding="utf-8")
        written.replace(file)
    return dict(entries)


def _cache_file() -> Path:
    """Return the file of the cache; copies of the package in different places have different ones."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "rayfed" / f"options-{_digest(str(_PACKAGE))}.json"


def _package_version() -> str:
    """Return a digest of the names, sizes and times of all files of the package."""
    return _digest(repr(sorted(_files(_PACKAGE))))


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for item in os.scandir(folder):
        if item.is_dir():
            yield from _files(Path(item.path))
        elif item.name.endswith(".py"):
            yield item.path, item.stat().st_size, item.stat().st_mtime_ns


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.cache
def _stored(kind: str, name: str) -> Entry:
    values = _cached()[kind][name]
    fields = [(option["name"], _type(option["type"]), _field(option)) for option in values["options"]]
    declaration = dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)
    return Entry(values["summary"], declaration, tuple(values["nested"]), values["default_partition"])


def _field(option: Mapping[str, Any]) -> Any:
    metadata = option["metadata"]
    if "default" not in option:
        return dataclasses.field(metadata=metadata)
    default = option["default"]
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _type(text: str) -> Any:
    return functools.reduce(operator.or_, (_TYPES[part] for part in text.split(" | ")))


def _values(kind: str, name: str) -> dict[str, Any]:
    """Return what `_stored` makes an entry of, from the class."""
    cls = resolve(name, KINDS[kind], where=kind)
    hints = typing.get_type_hints(cls)
    return {
        "summary": _summary(kind, cls),
        "nested": _nested(cls),
        "default_partition": _default_partition(cls),
        "options": [_option(field, hints[field.name]) for field in dataclasses.fields(cls) if field.init],
    }


def _option(field: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    option: dict[str, Any] = {"name": field.name, "type": _type_text(hint), "metadata": dict(field.metadata)}
    if not is_required(field):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        option["default"] = default.name if option["type"] == ALGORITHM else default
    return option


def _type_text(hint: Any) -> str:
    texts = {kind: text for text, kind in _TYPES.items() if text != ALGORITHM}
    if hint in texts:
        return texts[hint]
    if _is_algorithm(hint):
        return ALGORITHM
    return " | ".join(texts[part] for part in typing.get_args(hint))


# From the classes


def _is_algorithm(hint: Any) -> bool:
    return isinstance(hint, type) and hint.__module__ == "rayfed.algorithm"


def _nested(cls: Any) -> tuple[str, ...]:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    hints = typing.get_type_hints(cls) if fields else {}
    return tuple(field.name for field in fields if field.init and _is_algorithm(hints[field.name]))


def _default_partition(cls: Any) -> str | None:
    partition = getattr(cls, "default_partition", "domains")
    return partition if isinstance(partition, str) else None  # otherwise it depends on the options


def _summary(kind: str, cls: Any) -> str:
    text = (cls.__doc__ or "").strip()
    if kind == "metrics":
        return " ".join(text.split("\n\n")[0].split())
    return str(getattr(cls, "reference", "") or text.partition("\n")[0])


def description(kind: str, name: str) -> str:
    """Return the text that opens the module of one of rayfed's own pieces, and that of its class, without importing it.

    The text of a module counts for algorithms only, whose modules open with the paper and its equations.
    """
    import ast

    module, _, attribute = KINDS[kind][name].partition(":")
    found: dict[str, Any] = {}
    while attribute not in found:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        if attribute not in found:  # a package imports it from the module that defines it
            imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
            module = next(node.module or "" for node in imports if attribute in {alias.name for alias in node.names})
    texts = [ast.get_docstring(tree)] if kind == "algorithm" else []
    texts.append(ast.get_docstring(found[attribute]))
    return "\n\n".join(text for text in texts if text)
