"""Parquet files of results, which may be read at any moment, and the small files beside the tables.

Every file has the number of its schema; a version of rayfed with another schema refuses the file.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.errors import StorageError, UsageError, one_line
from rayfed.core.round_record import MapPoint, RepresentationMap
from rayfed.records.storage import Storage
from rayfed.records.tables import check_rows

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 2
"""The number of the schema of results and checkpoints: what their columns and entries are, and what they mean."""
_KEY = b"rayfed.schema"
_ATTEMPTS = 3
_PARTITIONS = "partitions"
_HOLDINGS = pa.schema(
    [
        ("client", pa.int32()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("label", pa.int32()),
        ("count", pa.int64()),
    ]
)

_MAP = pa.schema(
    [
        *(("client", pa.int64()), ("domain", pa.string()), ("label", pa.int64())),
        *(("x", pa.float64()), ("y", pa.float64()), ("point", pa.string())),
    ]
)

CLIENTS_SCHEMA = pa.schema(
    [
        *(("trial", pa.string()), ("client", pa.int32()), ("domain", pa.string())),
        *(("examples", pa.int64()), ("role", pa.string())),
    ]
)


class ClientRow(NamedTuple):
    """A client, its domain, the number of its training examples, and its role: honest, attacker or unseen."""

    client: int
    domain: str
    examples: int
    role: str


Holding = tuple[int, str, str, int, int]
"""A client, its domain, a split, a class, and the number of its examples."""


def replace_parquet(table: pa.Table, folder: Storage, name: str) -> None:
    """Write `table` to a file, which at every moment has either the old rows or the new rows.

    Only one process may write a file. A crash may leave a hidden file, which the next call overwrites.
    """
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({_KEY: str(SCHEMA)}), stream, write_page_checksum=True)
    folder.write(name, memoryview(stream.getvalue()))


def read_parquet(
    folder: Storage, name: str, categories: Sequence[str] = (), *, schema: pa.Schema | None = None
) -> pa.Table:
    """Return the rows of one version of a file, also while another process replaces it.

    Args:
        categories: The columns that are returned as categories of distinct strings.
        schema: What `check_rows` compares the rows with; None: nothing.

    Raises:
        OSError: The file is missing or cannot be read.
        StorageError: The file is damaged.
        UsageError: The file has another schema than this version of rayfed.
    """
    _, rows = read_checked(folder, name, categories, schema=schema)
    return rows


def read_checked(
    folder: Storage, name: str, categories: Sequence[str] = (), *, schema: pa.Schema | None = None
) -> tuple[bytes, pa.Table]:
    """Return the content of a file for `decompressed`, and its rows, with the errors of `read_parquet`."""
    content, table = _whole_file(folder, name, categories)
    number = (table.schema.metadata or {}).get(_KEY, b"none").decode(errors="replace")
    check_schema(number, f"{folder.location}/{name}")
    if schema is not None:
        try:
            check_rows(table, schema)
        except ValueError as error:
            raise _damaged(folder, name, error) from error
    return content, table.replace_schema_metadata(None)


def _whole_file(folder: Storage, name: str, categories: Sequence[str]) -> tuple[bytes, pa.Table]:
    """Return the content of a file and its rows.

    An object store may give the size of the old version and the bytes of the new one, so it is read several times.
    """
    for attempt in range(_ATTEMPTS):
        content = folder.read(name)
        try:
            table = _rows(content, categories)
            table.validate(full=True)  # pyarrow takes any bytes for strings
        except Exception as error:  # pyarrow raises many kinds for damaged bytes
            if attempt == _ATTEMPTS - 1:
                raise _damaged(folder, name, error) from error
        else:
            return content, table
    raise AssertionError


def _damaged(folder: Storage, name: str, error: Exception) -> StorageError:
    reason = one_line(error)[:120]
    return StorageError(
        f"{folder.location}/{name}: damaged, not the Parquet file that rayfed wrote ({reason}); restore it, or delete "
        "it and run its trials again"
    )


def decompressed(content: bytes, categories: Sequence[str] = ()) -> pa.Table:
    """Return the rows of a file, with the columns `categories` as categories of distinct strings."""
    return _rows(content, categories).replace_schema_metadata(None)


def _rows(content: bytes, categories: Sequence[str]) -> pa.Table:
    there = pq.read_schema(pa.BufferReader(content)).names
    known = [name for name in categories if name in there]  # a file of another version may lack some
    file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True, read_dictionary=known)
    return file.read()


def check_schema(number: object, where: str) -> None:
    """Raise UsageError if the schema of results is not number `SCHEMA`."""
    if str(number) != str(SCHEMA):
        raise UsageError(
            f"{where}: has schema {number}, and this version of rayfed reads schema {SCHEMA}; give another folder, or "
            "use the version of rayfed that wrote it"
        )


def write_holdings(home: Storage, digest: str, holdings: Iterable[Holding]) -> None:
    """Write how many examples of each class a client holds to `partitions/<partition_hash>.parquet`, for plots.

    Trials with the same partition share the file, which is written once.
    """
    folder = home.child(_PARTITIONS)
    name = f"{digest}.parquet"
    if name in folder.files():
        return
    rows = []
    for holding in holdings:
        rows.append(dict(zip(_HOLDINGS.names, holding, strict=True)))
    replace_parquet(pa.Table.from_pylist(rows, schema=_HOLDINGS), folder, name)


def read_holdings(home: Storage, digest: str) -> "pd.DataFrame | None":
    """Return the partition with the hash `digest`; None if it was not recorded."""
    try:
        return read_parquet(home.child(_PARTITIONS), f"{digest}.parquet", schema=_HOLDINGS).to_pandas()
    except FileNotFoundError:
        return None


def read_map(folder: Storage, name: str) -> "pd.DataFrame":
    """Return the points of a map that `write_map` wrote.

    Raises:
        OSError: The file is missing or cannot be read.
        StorageError: The file is damaged.
    """
    _, table = _whole_file(folder, name, ())
    try:
        points = table.replace_schema_metadata(None).select(_MAP.names).cast(_MAP)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise _damaged(folder, name, error) from error
    return points.to_pandas()


def write_clients(home: Storage, trial: str, rows: Sequence[ClientRow]) -> None:
    """Write the clients of a trial to `clients/<trial>.parquet`."""
    table = [{"trial": trial, **row._asdict()} for row in rows]
    replace_parquet(pa.Table.from_pylist(table, schema=CLIENTS_SCHEMA), home.child("clients"), f"{trial}.parquet")


def write_map(folder: Storage, trial: str, round: int, map: RepresentationMap) -> None:
    """Write a map of representations to `<trial>-round<r>-<metric>-<point>-<split>-<layer>.parquet` in `folder`.

    The columns are client (-1: a test set of the server), domain, label, x, y and point, with one row per example. The
    point in the file's name is "joint" for a map of several points.
    """
    import pandas as pd  # imported late: the process of the recorder rarely writes a map

    name = map.name.rpartition(":")[2]
    layer = map.layer.replace(".", "_")
    table = pd.DataFrame(map.points, columns=list(MapPoint._fields))
    file = f"{trial}-round{round}-{name}-{map.point}-{map.split}-{layer}.parquet"
    folder.write(file, table.to_parquet(index=False))
