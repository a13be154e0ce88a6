"""Readers for tables: Parquet and CSV files, and Arrow streams as written by the package `datasets`.

The cells of a CSV file are text: what they stand for depends on what a column is used for (`columns`).
"""

import csv
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pandas
import pyarrow as pa
from pyarrow import ipc, parquet

from rayfed.core.errors import UsageError
from rayfed.data.readers.files import readable

ENDINGS = (".parquet", ".arrow")
CSV = ".csv"
SEPARATORS = ",;\t|"


def schema(path: Path) -> pa.Schema:
    """Return the schema of a file.

    Raises:
        UsageError: The file is missing, empty, truncated or damaged; this holds for all functions of this module.
    """
    with _readable(path):
        if is_csv(path):
            return _csv(path).schema
        return _arrow(path).schema if path.suffix == ".arrow" else parquet.read_schema(path)


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a file, with categories decoded; an Arrow file is memory-mapped, not read."""
    check_columns(path, columns)
    names = list(dict.fromkeys(columns))
    with _readable(path):
        if is_csv(path):
            return _csv(path).select(names)
        if path.suffix == ".arrow":
            table = _arrow(path).read_all().select(names)
        else:
            file = parquet.ParquetFile(path)
            table = file.read(columns=names)
            if table.num_rows != file.metadata.num_rows:  # pyarrow does not notice a damaged page that is too short
                raise ValueError(f"a column of {table.num_rows} rows, but the file says {file.metadata.num_rows}")
        table.validate(full=True)
        plain_schema = pa.schema([field.with_type(plain(field.type)) for field in table.schema])
        return table if plain_schema == table.schema else table.cast(plain_schema)


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in which `read` returns a column: that of the categories, text as string, decimals as double."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return pa.float64() if pa.types.is_decimal(kind) else kind


def batches(path: Path, column: str, size: int) -> Iterator[pa.Array]:
    """Yield one column of a Parquet or Arrow file, at most `size` rows at a time."""
    check_columns(path, [column])
    with _readable(path):
        if path.suffix == ".arrow":
            for batch in _arrow(path):
                for start in range(0, len(batch), size):
                    yield batch.column(column).slice(start, size)
        else:
            for batch in parquet.ParquetFile(path).iter_batches(size, columns=[column]):
                yield batch.column(0)


def is_csv(path: Path) -> bool:
    """Return whether a file is read as CSV, by its ending."""
    return path.suffix.lower() == CSV


def place(files: Sequence[Path], name: str, row: int) -> str:
    """Return where a row of the concatenated files is: its file, and its number or the line of a CSV file."""
    for path in files:
        size = len(read(path, [name]))
        if row < size:
            return f"{path}: line {row + 2}" if is_csv(path) else f"{path}: row {row}"
        row -= size
    raise IndexError(row)


def separator(path: Path) -> str:
    """Return what separates the cells of a CSV file."""
    return (_csv(path).schema.metadata or {})[b"separator"].decode()


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise UsageError if a file lacks one of the `columns`."""
    names = schema(path).names
    for column in columns:
        if column not in names:
            raise UsageError(f"{path}: no column {column!r}; it has {', '.join(names) or 'none'}")


def _readable(path: Path) -> AbstractContextManager[None]:
    kinds = {".arrow": "an Arrow stream", CSV: "a CSV file"}
    return readable(path, kinds.get(path.suffix.lower(), "a Parquet file"))


def _arrow(path: Path) -> ipc.RecordBatchStreamReader:
    return ipc.open_stream(pa.memory_map(str(path)))


def _csv(path: Path) -> pa.Table:
    state = path.stat()
    return _read_csv(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _read_csv(path: Path, modified: int, size: int) -> pa.Table:
    """Return a CSV file with a line of names, all cells as strings; empty cells are missing."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        line = next((line for line in file if line.strip()), "")
    names, mark = max(((next(csv.reader([line], delimiter=mark), []), mark) for mark in SEPARATORS), key=_count)
    names = [name.strip() for name in names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} columns are named {name!r}")
    table = pandas.read_csv(
        path,
        sep=mark,
        dtype=pandas.ArrowDtype(pa.string()),
        keep_default_na=False,
        na_values=[""],
        skipinitialspace=True,
        low_memory=False,
    )
    if not isinstance(table.index, pandas.RangeIndex):  # pandas takes the first cells for names of the rows
        raise ValueError("rows have more cells than the first line has names")
    cells = pa.Table.from_pandas(table, preserve_index=False).rename_columns(names)
    return cells.replace_schema_metadata({"separator": mark})


def _count(candidate: tuple[list[str], str]) -> int:
    return len(candidate[0])
