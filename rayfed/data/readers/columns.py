"""Table columns as inputs, labels, clients, domains and splits."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa

from rayfed.core.errors import UsageError
from rayfed.data.population import count_classes
from rayfed.data.readers import encoded_images, tables

IMAGE_COLUMNS = ("image", "img")
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


def read_inputs(name: str, files: Sequence[Path], features: Sequence[str], rows: int, size: int | None) -> np.ndarray:
    """Return the inputs [rows, ...]: images or lists of numbers in one column, or the numbers in several columns.

    Encoded images and lists of lists of uint8 become uint8 [rows, channels, height, width], other lists of integers
    int64, and anything else float32.

    Raises:
        UsageError: Columns have other types, lists of different lengths, empty cells, or values that are not finite.
    """
    kinds = [_storage(tables.schema(files[0]).field(feature).type) for feature in features]
    if len(features) == 1 and encoded_images.is_image(kinds[0]):
        return encoded_images.decode_column(name, files, features[0], rows, size)
    if size is not None:
        raise UsageError(f"data.size={size}: column {features[0]!r} has no encoded images")
    if len(features) == 1 and _is_list(kinds[0]):
        values = _stack_lists(column(files, features[0]), files[0], features[0])
    else:
        for feature, kind in zip(features, kinds, strict=True):
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                    _check_numbers(files, feature)
                raise UsageError(
                    f"{files[0]}: column {feature!r} is {kind}; expected numbers, or one column of lists or images"
                )
        values = np.stack([column(files, feature).to_numpy().astype(np.float32) for feature in features], 1)
    if not np.isfinite(values).all():
        where = files[0] if len(files) == 1 else files[0].parent
        raise UsageError(f"{where}: {', '.join(features)}: has values that are not finite")
    return values


def _check_numbers(files: Sequence[Path], name: str) -> None:
    """Raise UsageError with the place of the first cell of a column of strings that is no number, if there is one."""
    cells = column(files, name)
    for row in not_numbers(cells)[:1].tolist():
        raise UsageError(f"{tables.place(files, name, row)}: column {name!r} has {cells[row].as_py()!r}, no number")


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _stack_lists(column_values: pa.ChunkedArray, path: Path, name: str) -> np.ndarray:
    """Return lists, or lists of lists, of one length as one array."""
    values = column_values.combine_chunks()
    values = values.storage if isinstance(values, pa.ExtensionArray) else values
    shape = [len(values)]
    while _is_list(values.type):
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False)) if len(values) else np.zeros(1, int)
        if len(lengths) != 1 or not lengths[0] > 0:
            raise UsageError(f"{path}: column {name!r} has lists of {lengths.tolist()[:4]} values; expected one length")
        shape.append(int(lengths[0]))
        values = values.flatten()
    if values.null_count or not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        kind = "empty values" if values.null_count else values.type
        raise UsageError(f"{path}: column {name!r} has lists of {kind}; expected numbers")
    array = values.to_numpy(zero_copy_only=False).reshape(shape)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return array.reshape(len(array), -1, *array.shape[-2:])
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
