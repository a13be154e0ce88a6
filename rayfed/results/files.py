"""Reading a Parquet file, and replacing it in one step."""

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.results.storage import Storage


def replace_parquet(table: pa.Table, folder: Storage, name: str) -> None:
    """Write `table` to a file, which at every moment holds either the old rows or the new ones, and never a part.

    Only one process may write to a file at a time. A crash leaves a hidden file, which the next call overwrites.
    """
    content = pa.BufferOutputStream()
    pq.write_table(table, content)
    folder.write(name, memoryview(content.getvalue()))


def read_parquet(folder: Storage, name: str) -> pa.Table:
    """Return the rows of a file, all of one version, also while another process replaces it.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return pq.ParquetFile(pa.BufferReader(folder.read(name))).read()
        except pa.ArrowInvalid:  # an object store told the size of the old version and sent the new one
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


_ATTEMPTS = 3
