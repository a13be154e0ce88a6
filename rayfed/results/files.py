"""Names that experiments and trials may have, and replacing a Parquet file in one step."""

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.errors import UsageError
from rayfed.results.storage import Storage

MOST_BYTES = 200
"""The longest name; disks take 255 bytes, of which the names of files need some more."""


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be the name of a file that Parquet readers see.

    Readers skip names that begin with "." or "_", which also hides unfinished files from them.

    Raises:
        UsageError: the name cannot be used; the message begins with `what`.
    """
    if not name or name[0] in "._" or any(letter in '/\\:*?"<>|' or not letter.isprintable() for letter in name):
        raise UsageError(f'{what}={name!r}: use a name without / \\ : * ? " < > | that does not begin with . or _')
    if (length := len(name.encode())) > MOST_BYTES:
        raise UsageError(f"{what}={name[:20]}…: a name of {length} bytes; use at most {MOST_BYTES}")
    return name


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
