"""Table columns as inputs: encoded images, lists of numbers, or numbers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfed.core.errors import UsageError
from rayfed.data.readers import encoded_images, tables
from rayfed.data.readers.columns import column, not_numbers

IMAGE_COLUMNS = ("image", "img")


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
