"""Table columns as inputs, labels, clients, domains and splits."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc

from rayfed.core.errors import UsageError, error_line
from rayfed.data.inputs import as_float32, count_classes, numbered_words, targets
from rayfed.data.readers import tables
from rayfed.data.readers.decoding import decode_column, is_image
from rayfed.data.readers.files import existing
from rayfed.data.splits import EXPECTED, split_masks

IMAGE_COLUMNS = ("image", "img")
NUMBERS = r"^-?(0|[1-9]\d*)(\.\d*)?$"


def misfit(file: object, name: str, found: str, expected: str) -> UsageError:
    """Return the error of a column that has, or is, something else than expected."""
    return UsageError(f"{file}: column {name!r} {found}; expected {expected}")


def column(files: Sequence[Path], name: str) -> pa.ChunkedArray:
    """Return one column of all files in their common type; no cell may be empty."""
    pieces = []
    for path in files:
        pieces.append(tables.read(path, [name])[name])
    values = _joined(files, name, pieces)
    if values.null_count:
        empty = values.is_null().to_numpy()
        found = f"is empty, as in {empty.sum()} of {len(empty)} rows; fill these cells in, or leave the rows out"
        place = tables.place(files, name, int(empty.argmax()))
        raise UsageError(f"{place}: column {name!r} {found}")
    return values


def _joined(files: Sequence[Path], name: str, pieces: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return pieces of a column, of which some may be integers or booleans and others wider integers or floats."""
    kinds = {piece.type for piece in pieces}
    if len(kinds) > 1 and all(map(_is_number, kinds)):
        pieces = [_as_integers(piece) for piece in pieces]
    try:
        others = kinds - {pa.null()}
        if pa.string() in kinds and len(others) > 1:
            raise TypeError("text in some files only")
        parts = []
        for piece in pieces:
            parts.append(pa.table([piece], [name]))
        return pa.concat_tables(parts, promote_options="permissive")[name]
    except (pa.ArrowException, TypeError) as error:
        types = [piece.type for piece in pieces]
        first = types[0]
        place = next(number for number, other in enumerate(types) if other != first)
        found = f"column {name!r} is {types[place]}, but {first} in {files[0].name}"
        reason = error_line(error)
        raise UsageError(f"{files[place]}: {found}; write it in one type ({reason})") from error


def _as_integers(piece: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return booleans as integers, and other values unchanged."""
    if pa.types.is_boolean(piece.type):
        return piece.cast(pa.int8())
    return piece


def labels_of(files: Sequence[Path], name: str | list[str], num_classes: int | None) -> tuple[np.ndarray, int | None]:
    """Return labels [rows, ...] and the number of classes, None if it follows from the labels.

    Several columns and lists hold several labels of an example, or classes at its positions.
    """
    if isinstance(name, list):
        return np.stack(list(_numbers(files, name)), 1), num_classes
    if _is_list(_storage(tables.schema(files[0]).field(name).type)):
        labels = _stack_lists(column(files, name), files[0], name)
        if labels.dtype == np.uint8 and labels.ndim == 4:
            labels = labels[:, 0]
        return labels, num_classes
    return classes(files, name, num_classes)


def classes(files: Sequence[Path], name: str, num_classes: int | None) -> tuple[np.ndarray, int]:
    """Return labels, int64 [rows], and the number of classes; strings are numbered in alphabetical order.

    Floats that are not all integers stay numbers, float32. The number of classes is `num_classes`, else that in the
    metadata of files of the Hugging Face hub, else the highest label plus 1.
    """
    values = _typed(files, name, column(files, name), NUMBERS)
    if pa.types.is_string(values.type):
        is_word = pandas.to_numeric(values.to_pandas(), errors="coerce").isna().to_numpy()
        if tables.is_text(files[0], name):
            rows = np.flatnonzero(is_word)
        else:
            rows = np.empty(0, int)
        if 0 < len(rows) < len(values):  # the numbers would be words as well
            found = f"has {values[int(rows[0])].as_py()!r}, and numbers in other rows"
            place = tables.place(files, name, int(rows[0]))
            raise misfit(place, name, found, "all integers or all words as labels")
        labels = _numbered(files, name, values)[0]
    elif _is_number(values.type):
        place_of = partial(_place_of_label, files, name)
        labels = targets("", values.to_numpy(), place_of)
        if labels.dtype.kind == "f":
            return labels, num_classes or 1
    else:
        raise misfit(files[0], name, f"is {values.type}", "integers or strings as labels")
    count = num_classes or _declared_classes(files[0], name)
    is_too_high = count and len(labels) and labels.max() >= count
    where = str(files[0])
    if is_too_high:
        where = tables.place(files, name, int(labels.argmax()))
    return labels, count_classes(f"{where}: column {name!r}", [labels], "data.num_classes", count)


def _place_of_label(files: Sequence[Path], name: str, row: int) -> str:
    """Return where a label is, to begin a message with."""
    return f"{tables.place(files, name, row)}: column {name!r}"


def _typed(files: Sequence[Path], name: str, values: pa.ChunkedArray, numbers: str = "") -> pa.ChunkedArray:
    """Return text of CSV files and folders as numbers or booleans if all cells stand for them; others unchanged.

    Numbers match the expression `numbers`. It does not match 001, which need not be the same as 1.
    """
    if tables.is_text(files[0], name) and len(values):
        cells = values.unique()
        if numbers and pc.all(pc.match_substring_regex(cells, numbers)).as_py():
            if "." in numbers:
                return values.cast(pa.float64())
            return values.cast(pa.int64())
        if set(pc.utf8_lower(cells).to_pylist()) <= {"true", "false"}:
            return values.cast(pa.bool_())
    return values


def class_names(files: Sequence[Path], name: str | list[str]) -> tuple[str, ...] | None:
    """Return the names of the classes that `labels_of` numbers; None for numbers, or several labels of an example."""
    if isinstance(name, list) or _is_list(_storage(tables.schema(files[0]).field(name).type)):
        return None
    values = _typed(files, name, column(files, name), NUMBERS)
    if not pa.types.is_string(values.type):
        return None
    return _numbered(files, name, values)[1]


def encode_clients(files: Sequence[Path], name: str) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return a column of clients as int64 [rows], and their names by these numbers; None if they are numbers."""
    clients, names = encode_names(files, name)
    if names == tuple(map(str, np.unique(clients))):
        return clients, None
    return clients, names


def encode_names(files: Sequence[Path], name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a column as int64 [rows], and the names; integers are kept, others numbered in alphabetical order."""
    values = _typed(files, name, column(files, name), r"^-?(0|[1-9]\d{0,17})$")
    try:
        if pa.types.is_floating(values.type):  # a column had gaps
            values = values.cast(pa.int64())
        if pa.types.is_integer(values.type):
            numbers = values.to_numpy().astype(np.int64)
            return numbers, tuple(map(str, np.unique(numbers)))
        return _numbered(files, name, values.cast(pa.string()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise misfit(files[0], name, f"is {values.type}", "integers or strings") from error


def _numbered(files: Sequence[Path], name: str, values: pa.ChunkedArray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the place of each string in the alphabetical order, int64 [rows], and the different strings in order."""
    return numbered_words(f"{files[0]}: column {name!r}", values.to_numpy())


def split_rows(files: Sequence[Path], name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return which rows are test examples and which are validation examples, bool [rows] each.

    The column has booleans, which mark test examples, or names of splits. Booleans mark no validation examples: None.
    """
    values = _typed(files, name, column(files, name))
    if pa.types.is_boolean(values.type):
        return values.to_numpy(), None
    if not (pa.types.is_string(values.type) or pa.types.is_integer(values.type)):
        raise misfit(files[0], name, f"is {values.type}", EXPECTED)
    return split_masks(f"{files[0]}: column {name!r}", values.to_numpy())


def _declared_classes(path: Path, name: str) -> int | None:
    """Return the number of classes of a label in a file's metadata, in the format of the package `datasets`."""
    metadata = (tables.schema(path).metadata or {}).get(b"huggingface", b"{}")
    try:
        feature = json.loads(metadata)["info"]["features"][name]
        return len(feature["names"]) or None
    except (ValueError, KeyError, TypeError):  # no class label, or metadata in another format
        return None


def holds_images(path: Path, features: Sequence[str]) -> bool:
    """Return whether `features` is one column of encoded images."""
    if len(features) != 1:
        return False
    kind = tables.schema(path).field(features[0]).type
    return is_image(_storage(kind))


def read_inputs(name: str, files: Sequence[Path], features: Sequence[str], rows: int, size: int | None) -> np.ndarray:
    """Return the inputs [rows, ...]: images or lists of numbers in one column, or the numbers in several columns.

    Encoded images and lists of lists of uint8 become uint8 [rows, channels, height, width], other lists of integers
    int64, and all other columns float32.
    """
    schema = tables.schema(files[0])
    kinds = [_storage(schema.field(feature).type) for feature in features]
    if holds_images(files[0], features):
        return decode_column(name, files, features[0], rows, size)
    if size is not None:
        raise UsageError(f"data.size={size}: column {features[0]!r} has no encoded images")
    if len(features) == 1 and _is_list(kinds[0]):
        (feature,) = features
        values = _stack_lists(column(files, feature), files[0], feature)
    else:
        values = np.stack(list(_numbers(files, features)), 1)
    of_a_row = tuple(range(1, values.ndim))
    wrong = np.flatnonzero(~np.isfinite(values).all(of_a_row))
    if len(wrong):
        row = tables.place(files, features[0], int(wrong[0]))
        place = f"{row}: {', '.join(features)}"
        raise UsageError(f"{place}: has values that are not finite, as in {len(wrong)} of {len(values)} rows")
    return values


def tokens(files: Sequence[Path], name: str, folder: str, length: int | None) -> dict[str, np.ndarray]:
    """Return a column of texts as the tokens, and where they are, of a tokenizer: int64 [rows, length] each."""
    from transformers import AutoTokenizer

    path = existing("data.tokenizer", folder, "expected what tokenizer.save_pretrained writes", "folder")
    texts = column(files, name)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    form: dict[str, Any]
    if length is None:
        form = {"padding": True}
    else:
        form = {"padding": "max_length", "truncation": True, "max_length": length}
    encoded = tokenizer(texts.to_pylist(), **form)
    return {name: np.array(encoded[name], np.int64) for name in ("input_ids", "attention_mask")}


def _numbers(files: Sequence[Path], names: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the numbers of each column, float32 [rows]."""
    for name in names:
        cells = _typed(files, name, column(files, name))
        if not (_is_number(cells.type) or pa.types.is_string(cells.type)):
            raise misfit(files[0], name, f"is {cells.type}", "numbers, or one column of lists or images")
        numbers = pandas.to_numeric(cells.to_pandas(), errors="coerce").to_numpy()
        wrong = np.flatnonzero(np.isnan(numbers))
        if len(wrong):
            cell = cells[int(wrong[0])].as_py()
            row = tables.place(files, name, int(wrong[0]))
            found = "a gap"
            if isinstance(cell, str):
                found = repr(cell)
            share = f"{len(wrong)} of {len(cells)} rows"
            raise misfit(row, name, f"has {found}, no number, as {share}", "numbers")
        yield as_float32(f"{files[0]}: column {name!r}", numbers)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _storage(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return tables.plain(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _stack_lists(column_values: pa.ChunkedArray, path: Path, name: str) -> np.ndarray:
    """Return lists, or lists of lists, of one length as one array."""
    values = column_values.combine_chunks()
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    shape = [len(values)]
    while _is_list(values.type):
        if len(values):
            lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        else:
            lengths = np.zeros(1, int)
        if len(lengths) != 1 or not lengths[0] > 0:
            found = f"has lists of {lengths.tolist()[:4]} values"
            raise misfit(path, name, found, "one length")
        shape.append(int(lengths[0]))
        values = values.flatten()
    are_numbers = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if values.null_count or not are_numbers:
        kind = "empty values"
        if not values.null_count:
            kind = values.type
        raise misfit(path, name, f"has lists of {kind}", "numbers")
    array = values.to_numpy(zero_copy_only=False).reshape(shape)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return array.reshape(len(array), -1, *array.shape[-2:])
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    return as_float32(f"{path}: column {name!r}", array)
