"""A reader for pickles of arrays, numbers and strings, and dicts, lists and tuples of these.

A pickle is a program that calls functions. Here nothing that a file names is imported or called, and nothing is
allocated before the file holds it. Python's own unpickler, restricted to NumPy's classes, can be made to corrupt memory
or to fill it.
"""

import itertools
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NUMBERS = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
"""NumPy's codes of the integers that arrays may have."""
_BYTE_ORDERS = ("|", "<", ">", "=")
_MOST_SIDES = 8
_MOST_STEPS = 3_000_000  # CIFAR-100 takes less than a million
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


class _Mark:
    """The beginning of the items of a tuple, a list or a dict on the stack."""


@dataclass(frozen=True)
class _Name:
    """A class or a function that the file names."""

    module: str
    name: str


@dataclass
class _Type:
    """The type of the numbers of an array."""

    code: str
    order: str = "|"

    def build(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def dtype(self) -> "np.dtype[Any]":
        if self.code not in _NUMBERS or self.order not in _BYTE_ORDERS:
            raise ValueError(f"an array has the type {self.order}{self.code}, no integers")
        return np.dtype(f"{self.order}{self.code}")


@dataclass
class _Array:
    """An array before its values, which follow."""

    values: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    def build(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        if isinstance(content, str):
            content = content.encode("latin-1")
        fits = all(type(side) is int and 0 <= side < 2**31 for side in shape)
        if len(shape) > _MOST_SIDES or not fits:
            raise ValueError(f"the shape of an array does not fit its {len(content)} bytes")
        dtype = kind.dtype()
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"an array has {len(content)} bytes and the shape {list(shape)}")
        flat = np.frombuffer(content, dtype)
        if is_fortran is True:
            self.values = flat.reshape(shape, order="F")
        else:
            self.values = flat.reshape(shape)


def read_pickle(content: bytes) -> Any:
    """Return the value in a pickle; arrays are read-only. Strings of Python 2 are decoded as Latin-1.

    Raises:
        ValueError: The pickle is damaged, or holds anything else.
    """
    reader = _Reader()
    for opcode, argument, _ in itertools.islice(pickletools.genops(content), _MOST_STEPS):
        if opcode.name == "STOP":
            return _plain(reader.pop())
        reader.step(opcode.name, argument)
    raise ValueError(f"it does not end within {_MOST_STEPS:,} steps")


def _plain(value: Any) -> Any:
    """Return an array, or a dict with its arrays, as NumPy has them."""
    if isinstance(value, _Array):
        return value.values
    if not isinstance(value, dict):
        return value
    plain = dict(value)
    for key, item in value.items():
        if isinstance(item, _Array):
            plain[key] = item.values
    return plain


class _Reader:
    """Runs the opcodes of a pickle on a stack. `pickletools` documents what they mean."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Run one opcode."""
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _REMEMBERING:
            if argument is None:
                key = len(self._memo)
            else:
                key = argument
            self._memo[key] = self._top()
        elif name in _RECALLING:
            self._stack.append(self._memo[argument])
        elif name not in _IGNORED:
            self._combine(name, argument)

    def _combine(self, name: str, argument: Any) -> None:  # noqa: PLR0912 - one case for each opcode
        """Run an opcode that makes one value of those on the stack, or adds to one."""
        match name:
            case "TUPLE":
                self._stack.append(tuple(self._items()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                items = []
                for _ in range(count):
                    items.append(self.pop())
                self._stack.append(tuple(reversed(items)))
            case "LIST":
                self._stack.append(self._items())
            case "DICT":
                items = self._items()
                self._stack.append({})
                self._update(items)
            case "APPEND":
                self._extend([self.pop()])
            case "APPENDS":
                self._extend(self._items())
            case "SETITEM":
                value = self.pop()
                self._update([self.pop(), value])
            case "SETITEMS":
                self._update(self._items())
            case "GLOBAL":
                self._stack.append(_Name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                function = self.pop()
                self._stack.append(_Name(self.pop(), function))
            case "REDUCE":
                arguments = self.pop()
                self._stack.append(_called(self.pop(), arguments))
            case "BUILD":
                self._build(self.pop())
            case _:
                raise ValueError(f"it has the opcode {name}")

    def pop(self) -> Any:
        """Return the last value, and remove it from the stack."""
        value = self._top()
        del self._stack[-1]
        return value

    def _top(self) -> Any:
        if not self._stack:
            raise ValueError("its stack is empty")
        return self._stack[-1]

    def _items(self) -> list[Any]:
        """Return the values behind the last mark, and remove them and the mark from the stack."""
        items: list[Any] = []
        value = self.pop()
        while not isinstance(value, _Mark):
            items.append(value)
            value = self.pop()
        return items[::-1]

    def _extend(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise ValueError("it appends to no list")
        target.extend(items)

    def _update(self, items: list[Any]) -> None:
        """Add keys and values in turn to the last dict."""
        target = self._top()
        keys = items[::2]
        are_names = all(isinstance(key, str) for key in keys)
        if not isinstance(target, dict) or not are_names:
            raise ValueError("its keys are no strings of a dict")
        target.update(zip(keys, items[1::2], strict=True))

    def _build(self, state: Any) -> None:
        target = self._top()
        if not isinstance(target, (_Array, _Type)) or not isinstance(state, tuple):
            raise ValueError("it gives a state to what is no array")
        target.build(state)


def _called(function: Any, arguments: Any) -> Any:
    """Return what stands for the result of a function, which NumPy's pickles call."""
    match function, arguments:
        case _Name("_codecs", "encode"), (str(text), "latin1"):  # bytes as Python 3 writes them for Python 2
            return text.encode("latin-1")
        case _Name("__builtin__", "bytes"), ():
            return b""
        case _Name("numpy", "dtype"), (str(code), *_):
            return _Type(code)
        case _Name(module, "_reconstruct"), (_Name("numpy", "ndarray"), *_) if module in _MODULES:
            return _Array()
        case _Name(module, name), _:
            raise ValueError(f"it asks for {module}.{name}")
        case _:
            raise ValueError("it calls what is no function")


_VALUES = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
"""The opcodes that are a value."""
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "MARK": _Mark,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_REMEMBERING = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_RECALLING = frozenset(("GET", "BINGET", "LONG_BINGET"))
_IGNORED = frozenset(("PROTO", "FRAME"))
