"""Table columns as labels, clients, domains and splits."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa

from rayfed.core.errors import UsageError
from rayfed.data.population import count_classes
from rayfed.data.readers import tables

TEST, TRAINING = ("test",), ("train", "training", "validation", "valid", "val", "dev")


def column(files: Sequence[Path], name: str) -> pa.ChunkedArray:
    """Return one column of all files; its type must be the same in all of them, and no cell may be empty."""
    pieces: list[pa.ChunkedArray] = []
    for path in files:
        piece = tables.read(path, [name])[name]
        if pieces and piece.type != pieces[0].type:
            raise UsageError(f"{path}: column {name!r} is {piece.type}, but {pieces[0].type} in {files[0].name}")
        if piece.null_count:
            row = piece.is_null().index(True).as_py()
            raise UsageError(f"{tables.place([path], name, row)}: column {name!r} is empty; every row needs a value")
        pieces.append(piece)
    return pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], pieces[0].type)


def classes(files: Sequence[Path], name: str, num_classes: int | None) -> tuple[np.ndarray, int]:
    """Return labels, int64 [rows], and the number of classes; strings are numbered in alphabetical order.

    The number of classes is `num_classes`, else the one in the files' metadata, as files of the Hugging Face hub have
    it, else the highest label plus 1.
    """
    values = column(files, name)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        labels = values.to_numpy().astype(np.int64)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        rows = not_numbers(values) if tables.is_csv(files[0]) else np.empty(0, int)
        if 0 < len(rows) < len(values):  # the numbers would be words as well
            raise UsageError(
                f"{tables.place(files, name, int(rows[0]))}: column {name!r} has {values[int(rows[0])].as_py()!r}, and "
                "numbers in other rows; labels are all integers or all words"
            )
        labels = np.unique(values.to_numpy().astype(str), return_inverse=True)[1].astype(np.int64)
    else:
        raise UsageError(f"{files[0]}: column {name!r} is {values.type}; expected integers or strings as labels")
    if len(labels) and labels.min() < 0:
        where = tables.place(files, name, int(labels.argmin()))
        raise UsageError(f"{where}: label {labels.min()} means unlabelled; leave that split out")
    count = num_classes or _declared_classes(files[0], name)
    count = count or count_classes(f"{files[0]}: column {name!r}", [labels], "data.num_classes")
    if len(labels) and labels.max() >= count:
        raise UsageError(
            f"{tables.place(files, name, int(labels.argmax()))}: label {labels.max()}, but there are {count} classes "
            f"(0..{count - 1}); see data.num_classes"
        )
    return labels, count


def not_numbers(values: pa.ChunkedArray) -> np.ndarray:
    """Return the rows of a column of strings that are no numbers."""
    return np.flatnonzero(pandas.to_numeric(values.to_pandas(), errors="coerce").isna().to_numpy())


def encode_names(files: Sequence[Path], name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a column as int64 [rows], and the names; integers are kept, strings numbered in alphabetical order."""
    values = column(files, name)
    if pa.types.is_integer(values.type):
        numbers = values.to_numpy().astype(np.int64)
        return numbers, tuple(map(str, np.unique(numbers)))
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise UsageError(f"{files[0]}: column {name!r} is {values.type}; expected integers or strings")
    names, codes = np.unique(values.to_numpy().astype(str), return_inverse=True)
    return codes.astype(np.int64), tuple(names.tolist())


def test_rows(files: Sequence[Path], name: str) -> np.ndarray:
    """Return the test mask, bool [rows], from a column of booleans or of "test", "train", "validation", …."""
    values = column(files, name)
    if pa.types.is_boolean(values.type):
        return values.to_numpy()
    splits = values.to_numpy().astype(str)
    unknown = sorted(set(np.unique(splits).tolist()) - {*TEST, *TRAINING})
    if unknown:
        raise UsageError(f"{files[0]}: column {name!r} has {unknown[0]!r}; expected {', '.join((*TEST, *TRAINING))}")
    return np.isin(splits, TEST)


def _declared_classes(path: Path, name: str) -> int | None:
    """Return the number of classes of a label in a file's metadata, in the format of the package `datasets`."""
    metadata = (tables.schema(path).metadata or {}).get(b"huggingface")
    try:
        names = json.loads(metadata)["info"]["features"][name]["names"] if metadata else None
    except (ValueError, KeyError, TypeError):  # no class label, or metadata in another format
        return None
    return len(names) if names else None
