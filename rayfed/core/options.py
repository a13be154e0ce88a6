"""Declared options: dataclass fields with a meaning and a range, built from plain values with one-line errors.

Every configurable thing (an algorithm, a dataset, a partition, a model, a group of the configuration tree) is a frozen
dataclass whose fields are declared with `option`. `build` turns a mapping of plain values, as YAML or the command line
gives them, into such an object, or raises `UsageError` naming the key, the value and what would be right.
"""

import dataclasses
import datetime
import difflib
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError

SPACES = ("grid", "choice", "uniform", "loguniform", "randint")
"""What a sweep's file may write in place of a value, as {grid: [0.1, 1]}."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] | None = None,
    formerly: Sequence[str] = (),
) -> Any:
    """Declare a dataclass field with its meaning and its range.

    Args:
        default: The value of a field that is not given; without a default the field is required.
        help: The text that `--help` prints.
        low, high: Inclusive bounds.
        above, below: Exclusive bounds.
        choices: The only values allowed.
        formerly: Earlier names of the option. A configuration that uses one is refused with the present name.

    Bounds and choices apply to each element of a list. `None` is always allowed where the annotation allows it.
    """
    bounds = {"low": low, "above": above, "high": high, "below": below, "choices": choices}
    metadata = {"help": help, **{name: bound for name, bound in bounds.items() if bound is not None}}
    if formerly:
        metadata["formerly"] = tuple(formerly)
    if isinstance(default, (list, dict)):
        kind = type(default)
        return dataclasses.field(default_factory=lambda: kind(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type, values: Mapping[str, Any], *, where: str, also: Sequence[str] = ()) -> Any:
    """An instance of the dataclass `cls` from plain `values`; `where` is the key prefix for messages ("algorithm").

    `also` names keys that exist beside the fields and that the caller has taken out, for the suggestions. A class
    attribute `removed_options` maps keys that the class no longer has to what to use instead.

    Raises:
        UsageError: an unknown key, a missing one, a wrong type or a value out of range.
    """
    _check_decorated(cls, where)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in fields:
            if advice := getattr(cls, "removed_options", {}).get(name):
                raise UsageError(f"{where}.{name}={values[name]}: {advice}")
            check_renamed(name, fields.values(), prefix=f"{where}.")
            raise UsageError(f"{where}.{name}: no such key; {suggestion(name, [*fields, *also], prefix=f'{where}.')}")
    ready = {}
    for name, field in fields.items():
        if name in values:
            ready[name] = checked(values[name], hints[name], field.metadata, where=f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where}.{name}: needed, but not given ({field.metadata.get('help', 'no default')})")
    return cls(**ready)


def check_renamed(name: str, fields: "Iterable[dataclasses.Field[Any]]", *, prefix: str = "") -> None:
    """Raise UsageError with the present name if `name` is an earlier name of one of `fields`."""
    for field in fields:
        if name in field.metadata.get("formerly", ()):
            raise UsageError(f"{prefix}{name}: this key was renamed; use {prefix}{field.name}")


def _check_decorated(cls: type, where: str) -> None:
    """Options of a class without the decorator are none: its instances would have dataclasses' own fields as values."""
    for one in cls.__mro__:
        if not dataclasses.is_dataclass(one) or "__dataclass_params__" in vars(one):
            continue
        hints = vars(one).get("__annotations__", {})
        declared = [name for name, hint in hints.items() if "ClassVar" not in str(hint)]
        declared += [name for name, value in vars(one).items() if isinstance(value, dataclasses.Field)]
        if declared:
            raise UsageError(
                f"{where}: {one.__module__}:{one.__qualname__} declares {declared[0]}, but is no dataclass; write "
                "@dataclass(frozen=True, kw_only=True) above it"
            )


def checked(value: Any, hint: Any, bounds: Mapping[str, Any], *, where: str) -> Any:
    """`value` converted to the annotation `hint` and held against `bounds`; raises `UsageError` naming `where`."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None and (type(None) in kinds or Any in kinds):
        return None
    # 1.0 stays a float where int | float; and nearly everything can stand for a text
    for kind in sorted(kinds, key=lambda kind: (kind is not type(value), kind is str)):
        if kind is not type(None):
            found, converted = _convert(value, kind)
            if found:
                _hold(converted, bounds, where)
                return converted
    expected = " or ".join(_name(kind) for kind in kinds)
    raise UsageError(f"{where}={value!r}: expected {expected}, got {_got(value, kinds)}")


def _convert(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether `value` can stand for `kind` without loss, and the converted value."""
    origin = typing.get_origin(kind)
    if isinstance(value, np.generic):
        value = value.item()
    if kind is Any:
        return True, value
    if kind is bool:
        return isinstance(value, bool), value
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return isinstance(value, int) and not isinstance(value, bool), value
    if kind is float:
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string
            try:
                return True, float(value)
            except ValueError:
                return False, value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number, float(value) if is_number else value
    if kind is str:
        if isinstance(value, os.PathLike):
            return True, os.fspath(value)
        if isinstance(value, (int, float, datetime.date)) and not isinstance(value, bool):
            return True, str(value)  # a folder 2024-01-01, a domain 2010: YAML takes them for dates and numbers
        return isinstance(value, str), value
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False, value
        (inner, *_) = typing.get_args(kind)
        pairs = [_convert(item, inner) for item in value]
        return all(found for found, _ in pairs), origin(item for _, item in pairs)
    if origin is dict or kind is dict:
        return isinstance(value, Mapping), dict(value) if isinstance(value, Mapping) else value
    return isinstance(value, kind), value


def _hold(value: Any, bounds: Mapping[str, Any], where: str) -> None:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if "choices" in bounds and item not in bounds["choices"]:
            raise UsageError(f"{where}={item!r}: {suggestion(item, bounds['choices'])}")
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            continue
        if item != item:
            raise UsageError(f"{where}={item}: not a number")
        if math.isinf(item):
            raise UsageError(f"{where}={item}: must be finite")
        for name, fails, words in (
            ("low", lambda b, item=item: item < b, "at least"),
            ("above", lambda b, item=item: item <= b, "more than"),
            ("high", lambda b, item=item: item > b, "at most"),
            ("below", lambda b, item=item: item >= b, "less than"),
        ):
            if name in bounds and fails(bounds[name]):
                raise UsageError(f"{where}={item}: must be {words} {bounds[name]}")


def _name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    if kind in names:
        return names[kind]
    if typing.get_origin(kind) in (list, tuple):
        (inner, *_) = typing.get_args(kind)
        plural = {int: "whole numbers", float: "numbers", str: "texts"}
        return f"a list of {plural[inner]}" if inner in plural else "a list"
    return "a mapping" if typing.get_origin(kind) is dict or kind is dict else getattr(kind, "__name__", str(kind))


def _got(value: Any, kinds: Sequence[Any]) -> str:
    """The type of `value`, or of what is wrong in a list; and how a space is written where it looks meant as one."""
    lists = [kind for kind in kinds if typing.get_origin(kind) in (list, tuple)]
    if isinstance(value, (list, tuple)) and lists:
        (inner, *_) = typing.get_args(lists[0])
        return next(f"{item!r} in it" for item in value if not _convert(item, inner)[0])
    if isinstance(value, (list, tuple)) and value:
        return f"list; a sweep searches over values written {{grid: [{', '.join(map(str, value))}]}}"
    if isinstance(value, Mapping) and len(value) == 1:
        (key,) = map(str, value)
        if key in SPACES:
            return f"a space, {{{key}: …}}; rayfed.sweep searches one, a single run takes one value"
        if near := difflib.get_close_matches(key, SPACES, n=1):
            return f"{{{key}: …}}; did you mean {{{near[0]}: …}}?"
    return type(value).__name__


def suggestion(wrong: Any, known: Iterable[Any], *, prefix: str = "") -> str:
    """ "did you mean …?" where a known name is near `wrong`, else the list of known names."""
    names = list(dict.fromkeys(str(name) for name in known))
    near = difflib.get_close_matches(str(wrong), names, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known: {', '.join(sorted(names)) or 'none'}"
