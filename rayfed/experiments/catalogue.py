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
from rayfed.core.options import checked_options, is_required
from rayfed.core.registry import resolve
from rayfed.data.partitions import PARTITIONS
from rayfed.data.sets import DATASETS
from rayfed.losses import LOSSES
from rayfed.metrics import METRICS, chosen_metrics
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


def check_choices(
    algorithm: Mapping[str, Any], choices: Mapping[str, tuple[str | None, Mapping[str, Any]]], metrics: Any
) -> None:
    """Check the names and the options of everything that a configuration chooses, without making it.

    Whatever is the user's own is passed over, and so is what only the data can tell.

    Args:
        algorithm: The name and the options of the algorithm.
        choices: Name and options of data, partition, model and augmentation by key. The name None is that of the
            partition that the dataset prescribes.
        metrics: The options of the metrics by name.

    Raises:
        UsageError: A name is unknown, or an option is unknown, missing, of the wrong type or out of range.
    """
    _check_algorithm(algorithm, "algorithm")
    for kind, (name, options) in choices.items():
        if name is None:
            data = choices["data"][0] or ""
            name = entry("data", data).default_partition if data in DATASETS else None
        if name is not None:
            _check(kind, name, options, where=kind, named=f"{kind}.name", complete=kind != "partition")
    for name, options in chosen_metrics(metrics).items():
        _check("metrics", name, options, where=f"metrics.{name}", named=f"metrics.{name}")


def _check_algorithm(values: Any, where: str) -> None:
    values = {"name": values} if isinstance(values, str) else values
    name = values.get("name", "fedavg") if isinstance(values, Mapping) else None
    if not isinstance(name, str):
        return  # the error is that of `build_algorithm`
    options = {key: value for key, value in values.items() if key != "name"}
    for key in entry("algorithm", name).nested if name in ALGORITHMS else ():
        if key in options:
            _check_algorithm(options[key], f"{where}.{key}")
    _check("algorithm", name, options, where=where, named=f"{where}.name")


def _check(kind: str, name: str, options: Mapping[str, Any], *, where: str, named: str, complete: bool = True) -> None:
    """Raise UsageError if `name` or `options` are wrong.

    Args:
        complete: Whether an option that is missing is an error. A dataset may set options of its partition.
    """
    if ":" in name:
        return
    if name not in KINDS[kind]:
        resolve(name, KINDS[kind], where=named)  # raises
    known = entry(kind, name)
    needed = [] if complete else [field.name for field in dataclasses.fields(known.declaration) if is_required(field)]
    if any(key not in options for key in needed):
        return
    also = ("name",) if kind in ("algorithm", "augment", "loss", "sampling", "lr_schedule") else ()
    checked_options(known.declaration, options, where=where, also=also, apart=known.nested)


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
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    texts = [ast.get_docstring(tree)] if kind == "algorithm" else []
    texts += [ast.get_docstring(classes[attribute])] if attribute in classes else []
    return "\n\n".join(text for text in texts if text)
