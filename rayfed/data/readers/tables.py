"""Readers for tables: Parquet and CSV files, and Arrow streams and folders as written by the package `datasets`.

The cells of a CSV file are text: what they stand for depends on what a column is used for (`columns`). All functions
raise UsageError if a file is missing, empty, truncated or damaged.
"""

import bz2
import csv
import functools
import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import pandas
import pyarrow as pa
from pyarrow import ipc, parquet

from rayfed.core.errors import UsageError
from rayfed.data.readers.files import existing, files_below, inside, readable
from rayfed.data.splits import EXPECTED, split_in

ENDINGS = (".parquet", ".arrow")
CSV_ENDINGS = "CSV files end in .csv or .tsv, also compressed, as .csv.gz"
CSV = (".csv", ".tsv")
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # at the start of a file
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""How compressed CSV files are opened, by their endings; pandas knows them, too."""
SEPARATORS = ",;\t|"
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # in the name of a folder


def schema(path: Path) -> pa.Schema:
    """Return the schema of a file, and of the columns in the names of its folders."""
    stored = _stored_schema(path)
    for name in folder_columns(path).keys() - set(stored.names):
        stored = stored.append(pa.field(name, pa.string()))
    return stored


def _stored_schema(path: Path) -> pa.Schema:
    with _readable(path):
        if is_csv(path):
            return _csv(path).schema
        if path.suffix == ".arrow":
            return _arrow(path).schema
        return parquet.read_schema(path)


def folder_columns(path: Path) -> dict[str, str | None]:
    """Return the columns in the names of a file's folders, such as site=north/0.parquet, as pandas writes them.

    Their values are text; None stands for a missing value.
    """
    columns: dict[str, str | None] = {}
    for folder in path.parents:
        name, mark, value = folder.name.partition("=")
        if not mark:
            break
        if value == NO_VALUE:
            columns[unquote(name)] = None
        else:
            columns[unquote(name)] = unquote(value)
    return columns


def is_text(path: Path, column: str) -> bool:
    """Return whether the cells of a column are text, whatever they stand for."""
    if is_csv(path):
        return True
    return column in folder_columns(path) and column not in _stored_schema(path).names


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a file, with categories decoded; an Arrow file is memory-mapped, not read."""
    check_columns(path, columns)
    stored = set(_stored_schema(path).names)
    given = folder_columns(path)
    present = [name for name in dict.fromkeys(columns) if name in stored]
    table = _read(path, present)
    for name in dict.fromkeys(columns):
        if name not in stored:
            text = pa.scalar(given[name], pa.string())
            table = table.append_column(name, pa.repeat(text, table.num_rows))
    return table


def _read(path: Path, names: Sequence[str]) -> pa.Table:
    """Return columns that are in a file itself."""
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
        fields = []
        for field in table.schema:
            fields.append(field.with_type(plain(field.type)))
        plain_schema = pa.schema(fields)
        if plain_schema == table.schema:
            return table
        return table.cast(plain_schema)


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in which `read` returns a column: that of the categories, text as string, decimals as double."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_decimal(kind):
        return pa.float64()
    return kind


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
    """Return whether a file is read as CSV, by its ending, such as .csv or .csv.gz."""
    name = path.name.lower()
    packed = Path(name).suffix
    if packed in OPENERS:
        name = name.removesuffix(packed)
    return name.endswith(CSV)


def place(files: Sequence[Path], name: str, row: int) -> str:
    """Return where a row of the concatenated files is: its file, and its number or the line of a CSV file."""
    for path in files:
        size = len(read(path, [name]))
        if row < size:
            if is_csv(path):
                return f"{path}: line {row + 2}"
            return f"{path}: row {row}"
        row -= size
    raise IndexError(row)


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise UsageError if a file lacks one of the `columns`."""
    names = schema(path).names
    for column in columns:
        if column not in names:
            present = ", ".join(names) or "none"
            raise UsageError(f"{path}: no column {column!r}; it has {present}")
        if names.count(column) > 1:
            count = names.count(column)
            raise UsageError(f"{path}: {count} columns are called {column!r}; rename them, or drop all but one")


def _readable(path: Path) -> AbstractContextManager[None]:
    if is_csv(path):
        return readable(path, "a CSV file")
    if path.suffix == ".arrow":
        return readable(path, "an Arrow stream")
    if path.suffix == ".parquet":
        return readable(path, "a Parquet file")
    return readable(path, f"a Parquet file; {CSV_ENDINGS}")


def _arrow(path: Path) -> ipc.RecordBatchStreamReader:
    return ipc.open_stream(pa.memory_map(str(path)))


def _csv(path: Path) -> pa.Table:
    state = path.stat()
    return _read_csv(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _read_csv(path: Path, modified: int, size: int) -> pa.Table:
    """Return a CSV file with a line of names, all cells as strings; empty cells are missing."""
    try:
        names, mark = _head(path)
        table = pandas.read_csv(
            path,
            sep=mark,
            dtype=pandas.ArrowDtype(pa.string()),
            keep_default_na=False,
            na_values=[""],
            skipinitialspace=True,
            low_memory=False,
        )
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    if not isinstance(table.index, pandas.RangeIndex):  # pandas takes the first cells for names of the rows
        raise ValueError("rows have more cells than the first line has names")
    stripped = [name.strip() for name in names]
    return pa.Table.from_pandas(table, preserve_index=False).rename_columns(stripped)


def _head(path: Path) -> tuple[list[str], str]:
    """Return the names of the columns of a CSV file, and what separates cells: what gives the most names."""
    with _opened(path) as file:
        lines = (line.decode("utf-8-sig") for line in file)
        line = next((line for line in lines if line.strip()), "")
    candidates = []
    for mark in SEPARATORS:
        cells = next(csv.reader([line], delimiter=mark), [])
        candidates.append((cells, mark))
    return max(candidates, key=lambda candidate: len(candidate[0]))


def _opened(path: Path) -> IO[bytes]:
    opener: Callable[[Path, str], IO[bytes]] = OPENERS.get(path.suffix.lower(), open)
    return opener(path, "rb")


def _not_utf8(path: Path) -> UsageError:
    """Return the error for a CSV file in another encoding, with the number of the first such line."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                encoding = "latin1"
                if line.startswith(UTF16):
                    encoding = "utf-16"
                remedy = f"save the file as UTF-8, for example by iconv -f {encoding} -t utf-8"
                byte = f"0x{line[error.start]:02x}"
                return UsageError(f"{path}: line {number} is not UTF-8 (byte {byte}); {remedy}")
    return UsageError(f"{path}: is not UTF-8; save the file as UTF-8")


FORMATS = "expected a folder written by datasets.save_to_disk, or a copy of a dataset's repository with Parquet files"


def tables_by_split(folder: Path) -> dict[str, list[Path]]:
    """Return the Parquet or Arrow files of each split of a Hugging Face dataset in a local folder, in order."""
    existing("data.folder", folder, FORMATS, "folder")
    if (folder / "dataset_dict.json").is_file():
        with readable(folder / "dataset_dict.json", "a list of splits"):
            splits = _json(folder / "dataset_dict.json")["splits"]
            return {split: _saved(inside(folder, split)) for split in splits}
    if (folder / "state.json").is_file():
        state = _json(folder / "state.json")
        return {str(state.get("_split") or "train"): _saved(folder)}
    found = []
    for path in files_below(folder):
        if path.suffix in ENDINGS and not path.name.startswith("cache-"):
            found.append(path)
    if not found:
        raise UsageError(f"data.folder={folder}: no .parquet or .arrow files; {FORMATS}")
    by_split = _named_splits(folder, found)
    for split, paths in by_split.items():
        parents = sorted({_above_columns(path) for path in paths})
        if len(parents) > 1:
            pair = f"{parents[0].name} and {parents[1].name}"
            several = f"{split} files in {len(parents)} folders, including {pair}"
            raise UsageError(f"data.folder={folder}: {several}; set data.folder to one of them")
    return by_split


def _above_columns(path: Path) -> Path:
    """Return the folder of a file, or the one above the folders that name columns."""
    return path.parents[len(folder_columns(path))]


def _saved(folder: Path) -> list[Path]:
    """Return the files of one split that datasets.save_to_disk wrote."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise UsageError(f"{folder}: saved with a separate selection of rows; save it again after flatten_indices()")
    with readable(folder / "state.json", "a list of data files"):
        return [inside(folder, entry["filename"]) for entry in state["_data_files"]]


def _json(path: Path) -> dict[str, Any]:
    with readable(path, "a JSON object"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _named_splits(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split in their names, such as mnist-train-00000-of-00001.parquet, else of their folders.

    If no file below `root` names a split, all are of the split train.
    """
    splits = {}
    for path in files:
        *folders, _ = path.relative_to(root).parts
        stems = [path.stem, *reversed(folders)]
        named = filter(None, map(split_in, stems))
        splits[path] = next(named, None)
    unnamed = [path for path, split in splits.items() if split is None]
    if 0 < len(unnamed) < len(files):
        raise UsageError(f"{unnamed[0]}: its name has no split, as other files have; expected {EXPECTED}")
    by_split: dict[str, list[Path]] = {}
    for path, split in splits.items():
        by_split.setdefault(split or "train", []).append(path)
    return by_split
