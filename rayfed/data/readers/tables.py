"""Readers for tables with pyarrow: Parquet files, and Arrow streams as written by the package `datasets`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc, parquet

from rayfed.core.errors import UsageError

ENDINGS = (".parquet", ".arrow")
# End of an Arrow stream; pyarrow does not require it, so it would not notice truncation.
_END = b"\xff\xff\xff\xff\0\0\0\0"


def schema(path: Path) -> pa.Schema:
    """Return the schema of a file.

    Raises:
        UsageError: The file is missing, empty, truncated or damaged; this holds for all functions of this module.
    """
    with _readable(path):
        return _arrow(path).schema if path.suffix == ".arrow" else parquet.read_schema(path)


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a file; an Arrow file is memory-mapped, not read."""
    check_columns(path, columns)
    with _readable(path):
        names = list(dict.fromkeys(columns))
        if path.suffix == ".arrow":
            table = _arrow(path).read_all().select(names)
        else:
            file = parquet.ParquetFile(path)
            table = file.read(columns=names)
            _check_rows(file, table.num_rows)
        table.validate(full=True)
        return table


def batches(path: Path, column: str, size: int) -> Iterator[pa.Array]:
    """Yield one column of a file, at most `size` rows at a time."""
    check_columns(path, [column])
    with _readable(path):
        if path.suffix == ".arrow":
            for batch in _arrow(path):
                for start in range(0, len(batch), size):
                    yield batch.column(column).slice(start, size)
        else:
            file, rows = parquet.ParquetFile(path), 0
            for batch in file.iter_batches(size, columns=[column]):
                yield batch.column(0)
                rows += len(batch)
            _check_rows(file, rows)


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise UsageError if a file lacks one of the `columns`."""
    names = schema(path).names
    for column in columns:
        if column not in names:
            raise UsageError(f"{path}: no column {column!r}; it has {', '.join(names) or 'none'}")


def _check_rows(file: parquet.ParquetFile, rows: int) -> None:
    """Check the number of rows, as pyarrow does not notice a column that a damaged page has shortened."""
    if rows != file.metadata.num_rows:
        raise ValueError(f"a column of {rows} rows, but the file says {file.metadata.num_rows}")


def _arrow(path: Path) -> ipc.RecordBatchStreamReader:
    source = pa.memory_map(str(path))
    source.seek(max(0, source.size() - len(_END)))
    if source.read() != _END:
        raise ValueError("its end is missing")
    source.seek(0)
    return ipc.open_stream(source)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        if isinstance(error, UsageError):
            raise
        kind = "an Arrow stream" if path.suffix == ".arrow" else "a Parquet file"
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: missing, empty, truncated, damaged or not {kind} ({reason})") from error
