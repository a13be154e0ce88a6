"""A restricted reader for pickle files: only numbers, strings and containers, so that a file cannot run code."""

import _codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray, numeric

from rayfed.data.readers.files import readable

ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _codecs.encode,  # bytes as Python 3 writes them for Python 2 (next line: empty ones)
    ("__builtin__", "bytes"): bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): multiarray._reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): multiarray.scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): numeric._frombuffer for core in ("core", "_core")},  # type: ignore[attr-defined]
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def read_pickle(path: Path, kind: str) -> Any:
    """Read a pickle file of Python 2 or 3 with arrays, numbers, strings, and lists, tuples and dicts of these.

    Raises:
        UsageError: The file is empty, truncated, damaged or contains anything else; the message names the `kind`.
    """
    with readable(path, kind), open(path, "rb") as file:
        try:
            return _RestrictedUnpickler(file, encoding="latin1").load()
        except MemoryError as error:  # a damaged length asks for any amount of memory
            raise ValueError("an object in it is larger than memory") from error
