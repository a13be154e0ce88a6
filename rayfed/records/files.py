"""Reading a Parquet file, and replacing it in one step.

Every file says by which schema it was written, so that a version of rayfed with another one refuses it.
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.errors import StorageError, UsageError
from rayfed.records.storage import Storage, one_line

SCHEMA = 1
"""The number of the schema of results and checkpoints: what their columns and entries are, and what they mean."""
_KEY = b"rayfed.schema"


def replace_parquet(table: pa.Table, folder: Storage, name: str) -> None:
    """Write `table` to a file, which at every moment holds either the old rows or the new ones, and never a part.

    Only one process may write to a file at a time. A crash leaves a hidden file, which the next call overwrites.
    """
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({_KEY: str(SCHEMA)}), stream, write_page_checksum=True)
    folder.write(name, memoryview(stream.getvalue()))


def read_parquet(folder: Storage, name: str) -> pa.Table:
    """Return the rows of a file, all of one version, also while another process replaces it.

    Raises:
        OSError: the file is missing or cannot be read.
        StorageError: the file is damaged.
        UsageError: the file has another schema than this version of rayfed.
    """
    return _checked(folder, name)[1]


def read_compressed(folder: Storage, name: str) -> bytes:
    """Return the content of a file for `decompressed`; what it raises is what `read_parquet` raises."""
    return _checked(folder, name)[0]


def decompressed(content: bytes, categories: Sequence[str] = ()) -> pa.Table:
    """Return the rows of a file; the columns `categories` hold each distinct string once."""
    file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True, read_dictionary=list(categories))
    return file.read().replace_schema_metadata(None)


def _checked(folder: Storage, name: str) -> tuple[bytes, pa.Table]:
    for attempt in range(_ATTEMPTS):
        content = folder.read(name)
        try:
            table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
        except Exception as error:  # pyarrow raises many kinds for damaged bytes
            # An object store may have told the size of the old version and sent the new one.
            if attempt == _ATTEMPTS - 1:
                raise StorageError(
                    f"{folder.location}/{name}: damaged, not the Parquet file that rayfed wrote "
                    f"({one_line(error)[:120]}); restore it, or delete it and run its trials again"
                ) from error
        else:
            number = (table.schema.metadata or {}).get(_KEY, b"none").decode()
            check_schema(number, f"{folder.location}/{name}")
            return content, table.replace_schema_metadata(None)
    raise AssertionError


def check_schema(number: object, where: str) -> None:
    """Refuse results with another number of the schema than `SCHEMA`.

    Raises:
        UsageError: the number is another.
    """
    if str(number) != str(SCHEMA):
        raise UsageError(
            f"{where}: the number of its schema is {number}, and this version of rayfed reads {SCHEMA}; give another "
            "folder, or use the version of rayfed that wrote it"
        )


_ATTEMPTS = 3
