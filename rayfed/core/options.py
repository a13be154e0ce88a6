"""Declaration and validation of options.

Everything that can be configured is a frozen dataclass: an algorithm, a dataset, a partition, a model, or a section of
the configuration. Its fields are declared with `option`: a default, a help text and a range. `build` creates such an
object from the plain values that YAML or the command line provide. Invalid values raise a one-line `UsageError` that
names the key, the value and what is allowed.
"""

import dataclasses
import datetime
import difflib
import functools
import inspect
import math
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rayfed.core.errors import UsageError, shown

SPACE_KINDS = ("grid", "choice", "uniform", "loguniform", "randint")
"""Kinds of search space that a sweep file may give in place of a value, such as {grid: [0.1, 1]}."""

_BOUNDS = (
    ("low", operator.lt, "at least"),
    ("above", operator.le, "more than"),
    ("high", operator.gt, "at most"),
    ("below", operator.ge, "less than"),
)
"""For each bound: its name, the comparison with a value that violates it, and the wording of the error."""

_FLOAT32 = 2.0**-126, 2.0**128 * (1 - 2.0**-24)
"""The smallest and the largest positive number of float32, in which models compute, at full precision."""

_WRITTEN_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""Numbers such as 5e-1, which YAML 1.1 reads as strings."""

_Options = TypeVar("_Options")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] | None = None,
    elsewhere: Mapping[str, str] | None = None,
    section: type | None = None,
) -> Any:
    """Declare a dataclass field with a help text and a range of allowed values.

    Bounds and choices apply to each element of a list. `None` is allowed whenever the annotation allows it.

    Args:
        default: Default value; an option without a default is required.
        help: Help text, printed by `--help`.
        low, high: Bounds, inclusive.
        above, below: Bounds, exclusive.
        choices: The allowed values.
        elsewhere: Values of other implementations by their name, such as {"authors": "0.1"}, for the documentation.
        section: The class of the options below this key, of which it holds an object, or None.
    """
    bounds = {"low": low, "above": above, "high": high, "below": below, "choices": choices}
    metadata: dict[str, Any] = {"help": help}
    for name, bound in bounds.items():
        if bound is not None:
            metadata[name] = bound
    if elsewhere:
        metadata["elsewhere"] = dict(elsewhere)
    if section is not None:
        metadata["section"] = section
    if isinstance(default, (list, dict)):
        kind = type(default)
        return dataclasses.field(default_factory=lambda: kind(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[_Options], values: Mapping[str, Any], *, where: str, also: Sequence[str] = ()) -> _Options:
    """Create an instance of the dataclass `cls` from plain values.

    Args:
        cls: A dataclass whose fields are declared with `option`.
        values: Values by field name.
        where: Prefix of the keys in error messages, such as "algorithm".
        also: Valid keys that are not fields because the caller handles them; used for suggestions only.

    Raises:
        UsageError: A key is unknown or missing, or a value has the wrong type or is out of range.
    """
    return cls(**checked_options(cls, values, where=where, also=also))


def checked_options(
    cls: type, values: Mapping[str, Any], *, where: str, also: Sequence[str] = (), apart: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the arguments with which `build`, whose errors it raises, creates an instance.

    Values whose keys are in `apart` are returned as they are, because the caller checks them.
    """
    _check_decorated(cls, where)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = type_hints(cls)
    for name in values:
        if name not in fields:
            symbol = symbol_of(name, fields.values())
            if symbol is not None:
                raise UsageError(f"{where}.{name}: no such key; {symbol[0]} is {where}.{symbol[1]}")
            raise no_such_key(name, [*fields, *also], prefix=f"{where}.")
    arguments = {}
    for name, field in fields.items():
        if name in values and name in apart:
            arguments[name] = values[name]
        elif name in values:
            hint = hints[name]
            section = field.metadata.get("section")
            if section is not None and values[name] is not None:
                arguments[name] = _section(section, values[name], f"{where}.{name}")
                continue
            arguments[name] = checked(values[name], hint, field.metadata, where=f"{where}.{name}")
        elif is_required(field):
            meaning = field.metadata.get("help", "no default")
            raise UsageError(f"{where}.{name}: required ({meaning})")
    return arguments


def _section(section: type, value: Any, where: str) -> Any:
    """Return the object of a section of options, a dataclass."""
    if not isinstance(value, Mapping):
        first = dataclasses.fields(section)[0].name
        raise UsageError(f"{where}={shown(value)}: expected a mapping; it has keys such as {where}.{first}")
    return build(section, value, where=where)


_LETTERS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "epsilon": "ε",
    "eps": "ε",
    "eta": "η",
    "kappa": "κ",
    "lambda": "λ",
    "lam": "λ",
    "mu": "μ",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "theta": "θ",
}


def symbol_of(name: str, fields: Iterable["dataclasses.Field[Any]"]) -> tuple[str, str] | None:
    """Return the Greek letter that `name` stands for, and the only field whose help explains it, if there is one."""
    word = name.strip("_").lower()
    letter = _LETTERS.get(word, word)
    if letter not in _LETTERS.values():
        return None
    explained = [field.name for field in fields if letter in field.metadata.get("help", "")]
    if len(explained) != 1:
        return None
    return letter, explained[0]


type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""The types of a class's fields by name, evaluated once."""


def is_required(field: "dataclasses.Field[Any]") -> bool:
    """Return whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def key_path(key: str) -> list[str]:
    """Return the parts of a dotted key. "module:Name" below a group is one part, though its module may have dots, as is
    "module:package.Name", whose packages have no capital letter."""
    group, _, rest = key.partition(".")
    module, colon, names = rest.partition(":")
    if not colon:
        return key.split(".")
    parts = names.split(".")
    ends = (place for place, part in enumerate(parts, 1) if part[:1].isupper())
    end = next(ends, 1)
    attribute = ".".join(parts[:end])
    return [group, f"{module}:{attribute}", *parts[end:]]


def _check_decorated(cls: type, where: str) -> None:
    """Refuse a subclass of a dataclass that declares options but lacks the decorator: they would be ignored."""
    for base in cls.__mro__:
        if not dataclasses.is_dataclass(base) or "__dataclass_params__" in vars(base):
            continue
        hints = vars(base).get("__annotations__", {})
        declared = []
        for name, hint in hints.items():
            if "ClassVar" not in str(hint):
                declared.append(name)
        for name, value in vars(base).items():
            if isinstance(value, dataclasses.Field):
                declared.append(name)
        if declared:
            name = f"{base.__module__}:{base.__qualname__}"
            remedy = "decorate it with @dataclass(frozen=True, kw_only=True)"
            raise UsageError(f"{where}: {name} declares {declared[0]} but is not a dataclass; {remedy}")


def checked(value: Any, hint: Any, bounds: Mapping[str, Any], *, where: str) -> Any:
    """Return `value`, as YAML or the command line gives it, converted to the type annotation `hint`.

    Args:
        hint: A scalar type, a list, a mapping or a union of these.
        bounds: Bounds and choices by name, as declared with `option`.
        where: The key, for error messages.

    Raises:
        UsageError: The value has the wrong type or is out of range.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = typing.get_args(hint)
    else:
        kinds = (hint,)
    value = _without_numpy(value)
    if value is None and (type(None) in kinds or Any in kinds):
        return None
    # Try the value's own type first, so that 1.0 stays a float for int | float. Try str last: it accepts numbers too.
    in_order = sorted(kinds, key=lambda kind: (kind is not type(value), kind is str))
    for kind in in_order:
        if kind is not type(None):
            valid, converted = _convert(value, kind)
            if valid:
                _check_bounds(converted, bounds, where)
                return converted
    expected = " or ".join(_type_name(kind) for kind in kinds)
    got = _describe(value, kinds)
    raise UsageError(f"{where}={shown(value)}: expected {expected}, got {got}")


def _convert(value: Any, kind: Any) -> tuple[bool, Any]:
    """Return whether `value` can be converted to `kind` without loss, and the converted value."""
    origin = typing.get_origin(kind)
    value = _without_numpy(value)
    if kind is Any:
        return True, _with_numbers(value)
    if kind is bool:
        return isinstance(value, bool), value
    if kind is int:
        return _convert_to_int(value)
    if kind is float:
        return _convert_to_float(value)
    if kind is str:
        return _convert_to_str(value)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False, value
        (inner, *_) = typing.get_args(kind)
        pairs = [_convert(item, inner) for item in value]
        return all(valid for valid, _ in pairs), origin(item for _, item in pairs)
    if origin is dict or kind is dict:
        if not isinstance(value, Mapping):
            return False, value
        return True, dict(value)
    return isinstance(value, kind), value


def _convert_to_int(value: Any) -> tuple[bool, Any]:
    value = _with_numbers(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return isinstance(value, int) and not isinstance(value, bool), value


def _convert_to_float(value: Any) -> tuple[bool, Any]:
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string
        try:
            return True, float(value)
        except ValueError:
            return False, value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return True, _as_float(value)
    return False, value


def _convert_to_str(value: Any) -> tuple[bool, Any]:
    if isinstance(value, os.PathLike):
        return True, os.fspath(value)
    if isinstance(value, (int, float, datetime.date)) and not isinstance(value, bool):
        return True, str(value)  # YAML reads a folder 2024-01-01 as a date and a domain 2010 as an integer
    return isinstance(value, str), value


def arguments_for(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a user's own function or class, which declares no types, as its arguments.

    Numbers such as 5e-1 are strings in YAML 1.1. They become numbers, unless the parameter is a string by its
    annotation or its default, and integers where these are integers.
    """
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature
        parameters = {}
    arguments = {}
    for name, value in options.items():
        parameter = parameters.get(name)
        kinds: set[Any] = set()
        if parameter:
            kinds = {parameter.annotation, type(parameter.default)}
        if {str, "str"} & kinds:
            arguments[name] = value
        else:
            arguments[name] = _with_numbers(value)
        if {int, "int"} & kinds and isinstance(arguments[name], float):
            arguments[name] = _convert(arguments[name], int)[1]
    return arguments


def _with_numbers(value: Any) -> Any:
    """Return `value` with numbers in place of strings such as 5e-1, also in lists and mappings."""
    if isinstance(value, str):
        if _WRITTEN_FLOAT.fullmatch(value):
            return float(value)
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_with_numbers(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _with_numbers(item) for key, item in value.items()}
    return value


def _as_float(value: float) -> float:
    """Return a number as a float; infinity for an integer beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        if value < 0:
            return -math.inf
        return math.inf


def is_int64(value: object) -> bool:
    """Return whether `value` is an integer that 64 bits hold, as every column of integers in the results does."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return -(2**63) <= value < 2**63


def _without_numpy(value: Any) -> Any:
    """Return a NumPy scalar as Python's own, without an import of NumPy, which a command line does not need."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value


def _check_bounds(value: Any, bounds: Mapping[str, Any], where: str) -> None:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if "choices" in bounds and item not in bounds["choices"]:
            choices = []
            for choice in bounds["choices"]:
                if isinstance(choice, bool):
                    choices.append(str(choice).lower())
                else:
                    choices.append(choice)
            raise UsageError(f"{where}={shown(item)}: {suggestion(item, choices)}")
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            continue
        if isinstance(item, float) and not math.isfinite(item):
            raise UsageError(f"{where}={item}: must be a finite number")
        for name, violates, wording in _BOUNDS:
            if name in bounds and violates(item, bounds[name]):
                raise UsageError(f"{where}={shown(item)}: must be {wording} {bounds[name]}")
        _check_size(item, where)


def _check_size(item: int | float, where: str) -> None:
    """Raise UsageError if no int64 holds an integer, or if a number would be 0 or infinite as float32."""
    if isinstance(item, int):
        if not is_int64(item):
            raise UsageError(f"{where}: is an integer of {_digits(item)} digits; must be below 2^63")
        return
    smallest, largest = _FLOAT32
    if item and not smallest <= abs(item) <= largest:
        size = "large"
        if abs(item) < smallest:
            size = "small"
        numbers = f"{smallest:.2g} to {largest:.2g}"
        raise UsageError(f"{where}={item}: is too {size} for float32, of which the numbers are {numbers}")


def _digits(number: int) -> int:
    try:
        return len(str(abs(number)))
    except ValueError:  # Python writes no integer of more than some thousand digits
        return int(math.log10(abs(number))) + 1


def _type_name(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
    if kind in names:
        return names[kind]
    if typing.get_origin(kind) in (list, tuple):
        (inner, *_) = typing.get_args(kind)
        plural = {int: "integers", float: "numbers", str: "strings"}
        if inner in plural:
            return f"a list of {plural[inner]}"
        return "a list"
    if typing.get_origin(kind) is dict or kind is dict:
        return "a mapping"
    return getattr(kind, "__name__", str(kind))


def _describe(value: Any, kinds: Sequence[Any]) -> str:
    """Describe what is wrong with `value`: its type, the invalid item of a list, or how to write a search space."""
    lists = []
    for kind in kinds:
        if typing.get_origin(kind) in (list, tuple):
            lists.append(kind)
    if isinstance(value, (list, tuple)) and lists:
        (inner, *_) = typing.get_args(lists[0])
        wrong = next(item for item in value if not _convert(item, inner)[0])
        hint = ""
        if inner is str:
            hint = unquoted(wrong)
        return f"{shown(wrong)} in it{hint}"
    if isinstance(value, bool) and (str in kinds or list[str] in kinds):
        return f"bool{unquoted(value)}"
    if isinstance(value, (list, tuple)) and value:
        return f"list; to search over values in a sweep, write {{grid: [{', '.join(map(str, value))}]}}"
    if isinstance(value, Mapping) and len(value) == 1:
        (key,) = map(str, value)
        if key in SPACE_KINDS:
            return f"a search space, {{{key}: …}}; rayfed sweep searches it, a single run takes one value"
        near = difflib.get_close_matches(key, SPACE_KINDS, n=1)
        if near:
            return f"{{{key}: …}}; did you mean {{{near[0]}: …}}?"
    if value is None:
        return "null"
    return type(value).__name__


def unquoted(value: Any) -> str:
    """Return what to do about a word that YAML reads as true or false, as the end of a message; empty for others."""
    if not isinstance(value, bool):
        return ""
    words = '"off" or "no"'
    if value:
        words = '"on" or "yes"'
    return f"; in YAML on, off, yes and no mean true and false, so write the word in quotes, such as {words}"


def no_such_key(name: str, known: Iterable[str], *, prefix: str = "") -> UsageError:
    """Return the error for a key that is none of the `known` keys."""
    remedy = suggestion(name, known, prefix=prefix)
    return UsageError(f"{prefix}{name}: no such key; {remedy}")


def is_near(wrong: Any, known: Iterable[Any]) -> bool:
    """Return whether one of the `known` names is close to `wrong`."""
    return bool(difflib.get_close_matches(str(wrong), list(map(str, known)), n=1))


def suggestion(wrong: Any, known: Iterable[Any], *, prefix: str = "") -> str:
    """Return "did you mean …?" if one of the `known` names is close to `wrong`, else the list of known names."""
    names = list(dict.fromkeys(str(name) for name in known))
    near = difflib.get_close_matches(str(wrong), names, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known: {', '.join(sorted(names)) or 'none'}"
