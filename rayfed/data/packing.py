"""Inputs of several arrays, a dict or a tuple, packed into one array of rows; see `rayfed.core.layout`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout
from rayfed.data.clients import Examples
from rayfed.data.lazy_rows import LazyRows, as_lazy_rows
from rayfed.data.population import check_inputs, model_inputs


def is_tree(x: Any) -> bool:
    """Return whether inputs are given as several arrays."""
    return isinstance(x, (Mapping, tuple))


class PackedFiles:
    """Arrays of which some lie in files, as one file of packed rows: rows are packed when they are read."""

    dtype = np.dtype(np.int32)

    def __init__(self, layout: Layout, parts: Sequence[np.ndarray | LazyRows]):
        self.layout, self.parts = layout, parts
        self.shape, self.row_bytes = (len(parts[0]), layout.words), 4 * layout.words

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` [n, words] with `rows`."""
        self.layout.pack([part[rows] for part in self.parts], out)


def packed(where: str, tree: Any, layout: Layout | None = None) -> tuple[np.ndarray | LazyRows, Layout]:
    """Return the rows of a dict or a tuple of arrays [n, ...], and their layout.

    Args:
        where: What the inputs belong to, for messages.
        tree: The arrays. Floats become float32; pixels of uint8 are scaled to [0, 1] when the model is called.
        layout: The layout that they must have, that of the first client; None: any.

    Raises:
        UsageError: They are no arrays of numbers of one length, or have another layout.
    """
    if not is_tree(tree) or not tree:
        raise UsageError(f"{where}: expected {layout or 'a dict or a tuple of arrays'}, got {type(tree).__name__}")
    by_name = isinstance(tree, Mapping)
    named = {str(name): part for name, part in (tree.items() if by_name else enumerate(tree))}
    if layout is not None and by_name == layout.by_name and {*named} == {leaf.name for leaf in layout.leaves}:
        named = {leaf.name: named[leaf.name] for leaf in layout.leaves}
    parts = {name: _column(f"{where}[{name}]", part) for name, part in named.items()}
    first, *others = parts
    for name in others:
        if len(parts[name]) != len(parts[first]):
            raise UsageError(f"{where}: {len(parts[first])} rows of {first} and {len(parts[name])} of {name}")
    kinds = [(name, _kind(part.dtype), tuple(part.shape[1:])) for name, part in parts.items()]
    own = Layout.of(kinds, by_name=by_name)
    if layout is not None and len(parts[first]) and own != layout:
        raise UsageError(f"{where}: got {_form(own)}; expected {_form(layout)}")
    layout, columns = layout or own, list(parts.values())
    if not len(columns[0]):
        return np.zeros((0, layout.words), np.int32), layout
    if any(isinstance(part, LazyRows) for part in columns):
        return LazyRows(PackedFiles(layout, columns), np.arange(len(columns[0]))), layout
    return layout.pack([part[:] for part in columns]), layout


def _form(layout: Layout) -> str:
    parts = ", ".join(f"{leaf} of {leaf.dtype}" for leaf in layout.leaves)
    return f"a {'dict' if layout.by_name else 'tuple'} of {parts}"


def _kind(dtype: "np.dtype[Any]") -> str:
    """Return the dtype in which the model gets a part."""
    if dtype.name in ("float32", "int64", "int32", "bool", "uint8"):
        return dtype.name
    return "float32" if dtype.kind == "f" else "int64" if dtype.itemsize > 2 else "int32"


def _column(where: str, given: Any) -> np.ndarray | LazyRows:
    """Return a part [n, ...] as an array, or as rows of a file."""
    part = as_lazy_rows(given)
    part = part if isinstance(part, LazyRows) else model_inputs(where, part)
    check_inputs(where, Examples(part, np.zeros(len(part))))
    return part


def padded(
    sequences: Sequence[Any], length: int | None = None, *, name: str = "input_ids", mask: str = "attention_mask"
) -> dict[str, np.ndarray]:
    """Return sequences of several lengths as one input, and where they are as another one.

    Args:
        sequences: Arrays [t, ...] of one type, which are padded with 0 behind their end.
        length: The length of all rows; None: the longest of `sequences`. All clients must have one length.
        name: The name of the input, an array [n, length, ...].
        mask: The name of the mask, int64 [n, length], which is 1 where a sequence is.
    """
    arrays = [np.asarray(sequence) for sequence in sequences]
    length = max(map(len, arrays), default=0) if length is None else length
    rows = [np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1)) for array in arrays]
    ends = np.array([len(array) for array in arrays])
    values = np.stack(rows) if rows else np.zeros((0, length), np.int64)
    return {name: values, mask: (np.arange(length) < ends[:, None]).astype(np.int64)}
