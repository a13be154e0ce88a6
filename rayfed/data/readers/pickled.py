"""Pickle files that hold numbers and texts and nothing else: a file from elsewhere cannot run code."""

import _codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray, numeric

from rayfed.core.errors import UsageError

ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _codecs.encode,  # how Python 3 writes bytes for Python 2, and in the next line no bytes
    ("__builtin__", "bytes"): bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): multiarray._reconstruct for core in ("core", "_core")},  # type: ignore[attr-defined]
    **{(f"numpy.{core}.multiarray", "scalar"): multiarray.scalar for core in ("core", "_core")},  # type: ignore[attr-defined]
    **{(f"numpy.{core}.numeric", "_frombuffer"): numeric._frombuffer for core in ("core", "_core")},  # type: ignore[attr-defined]
}


class _Numbers(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def read_pickle(path: Path, expected: str) -> Any:
    """What a pickle file of Python 2 or 3 holds: arrays, numbers, texts, and lists, tuples and dicts of these.

    Raises:
        UsageError: a file that is empty, cut short, damaged, or holds anything else; the line says what was `expected`.
    """
    try:
        with open(path, "rb") as file:
            return _Numbers(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: empty, cut short or damaged ({reason}); expected {expected}") from error
