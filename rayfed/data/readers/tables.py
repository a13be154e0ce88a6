"""Files of columns, read with pyarrow: Parquet, and Arrow streams as the package `datasets` writes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc, parquet

from rayfed.core.errors import UsageError

ENDINGS = (".parquet", ".arrow")
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream; pyarrow itself does without it and would miss a cut


def schema(path: Path) -> pa.Schema:
    """The columns of a file.

    Raises:
        UsageError: for a file that is missing, empty, cut short or damaged, as all functions here.
    """
    with _readable(path):
        return _arrow(path).schema if path.suffix == ".arrow" else parquet.read_schema(path)


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of a file, whole; an Arrow file is mapped into memory, not read."""
    check_columns(path, columns)
    with _readable(path):
        wanted = list(dict.fromkeys(columns))
        if path.suffix == ".arrow":
            table = _arrow(path).read_all().select(wanted)
        else:
            file = parquet.ParquetFile(path)
            table = file.read(columns=wanted)
            _check_rows(file, table.num_rows)
        table.validate(full=True)
        return table


def batches(path: Path, column: str, size: int) -> Iterator[pa.Array]:
    """One column of a file, at most `size` rows at a time."""
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
    """Refuses a file without one of the `columns`."""
    found = schema(path).names
    for column in columns:
        if column not in found:
            raise UsageError(f"{path}: no column {column!r}; it has {', '.join(found) or 'none'}")


def _check_rows(file: parquet.ParquetFile, rows: int) -> None:
    """pyarrow takes a column that a damaged page cut short for a whole one."""
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
        kind = "Arrow stream" if path.suffix == ".arrow" else "Parquet file"
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: missing, empty, cut short, damaged or no {kind} ({reason})") from error
