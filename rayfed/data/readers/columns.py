"""From columns of tables to labels, and to who or what each row belongs to."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfed.core.errors import UsageError
from rayfed.data.readers import tables

TEST, TRAINING = ("test",), ("train", "training", "validation", "valid", "val", "dev")


def column(files: Sequence[Path], name: str) -> pa.ChunkedArray:
    """One column of all files; they must agree on its type, and no cell may be empty."""
    pieces: list[pa.ChunkedArray] = []
    for path in files:
        piece = tables.read(path, [name])[name]
        if pieces and piece.type != pieces[0].type:
            raise UsageError(f"{path}: column {name!r} is {piece.type}, but {pieces[0].type} in {files[0].name}")
        if piece.null_count:
            row = piece.is_null().index(True).as_py()
            raise UsageError(f"{path}: row {row}: column {name!r} is empty; every row needs a value")
        pieces.append(piece)
    return pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], pieces[0].type)


def classes(files: Sequence[Path], name: str, num_classes: int | None) -> tuple[np.ndarray, int]:
    """Labels int64 [rows] and the number of classes; texts become numbers in alphabetical order.

    The number of classes is `num_classes`, else what the files say of themselves as the hub's do, else what there is.
    """
    values = column(files, name)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        labels = values.to_numpy().astype(np.int64)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        labels = np.unique(values.to_numpy().astype(str), return_inverse=True)[1].astype(np.int64)
    else:
        raise UsageError(f"{files[0]}: column {name!r} is {values.type}; expected whole numbers or texts as labels")
    if len(labels) and labels.min() < 0:
        raise UsageError(
            f"{_file_of(files, name, int(labels.argmin()))}: label {labels.min()}: not labelled; leave that part out"
        )
    count = num_classes or _declared(files[0], name) or int(labels.max(initial=0)) + 1
    if len(labels) and labels.max() >= count:
        raise UsageError(
            f"{_file_of(files, name, int(labels.argmax()))}: label {labels.max()}, but there are {count} classes "
            f"(0..{count - 1}); see data.num_classes"
        )
    return labels, count


def numbered(files: Sequence[Path], name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Whole numbers as they are, or texts by their place in alphabetical order: int64 [rows], and the names."""
    values = column(files, name)
    if pa.types.is_integer(values.type):
        found = values.to_numpy().astype(np.int64)
        return found, tuple(map(str, np.unique(found)))
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise UsageError(f"{files[0]}: column {name!r} is {values.type}; expected whole numbers or texts")
    names, place = np.unique(values.to_numpy().astype(str), return_inverse=True)
    return place.astype(np.int64), tuple(names.tolist())


def test_rows(files: Sequence[Path], name: str) -> np.ndarray:
    """bool [rows]: what a column says is for testing, true and false or "test" beside "train", "validation", …."""
    values = column(files, name)
    if pa.types.is_boolean(values.type):
        return values.to_numpy()
    found = values.to_numpy().astype(str)
    unknown = sorted(set(np.unique(found).tolist()) - {*TEST, *TRAINING})
    if unknown:
        raise UsageError(f"{files[0]}: column {name!r} has {unknown[0]!r}; expected {', '.join((*TEST, *TRAINING))}")
    return np.isin(found, TEST)


def _declared(path: Path, name: str) -> int | None:
    """How many classes a file's own description, in the form of the package `datasets`, gives a label."""
    told = (tables.schema(path).metadata or {}).get(b"huggingface")
    try:
        names = json.loads(told)["info"]["features"][name]["names"] if told else None
    except (ValueError, KeyError, TypeError):  # no class label, or a description of another form
        return None
    return len(names) if names else None


def _file_of(files: Sequence[Path], name: str, row: int) -> str:
    """The file in which a row of all files lies, and which of its rows it is."""
    for path in files:
        size = len(tables.read(path, [name]))
        if row < size:
            return f"{path}: row {row}"
        row -= size
    raise IndexError(row)
