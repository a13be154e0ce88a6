"""Names that experiments and trials may have, and replacing a Parquet file in one step."""

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.errors import StorageError, UsageError
from rayfed.results.storage import FULL, LocalStorage, Storage, one_line

MOST_BYTES = 200
"""The longest name; disks take 255 bytes, of which the names of files need some more."""


ROOM = 2**16
"""Bytes of a disk that are taken for the next version of a file, besides twice its size."""


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


def replace_parquet(table: pa.Table, folder: Storage, name: str, *, keep_room: bool = False) -> None:
    """Write `table` to a file, which at every moment holds either the old rows or the new ones, and never a part.

    Only one process may write to a file at a time. A crash leaves a hidden file, which the next call overwrites.

    Args:
        keep_room: Whether to take space on a disk for the next version of the file, so that it can be written when the
            disk is full. Only one file of a folder can have it.
    """
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, write_page_checksum=True)
    content = memoryview(stream.getvalue())
    if not keep_room or not isinstance(folder, LocalStorage):
        folder.write(name, content)
        return
    try:
        folder.write(name, content)
    except OSError as error:
        if error.errno not in FULL:
            raise
        try:
            folder.write_in_room(name, content)
        except OSError:
            raise error from None
    folder.keep_room(len(content) + ROOM // 2, 2 * len(content) + ROOM)


def read_parquet(folder: Storage, name: str) -> pa.Table:
    """Return the rows of a file, all of one version, also while another process replaces it.

    Raises:
        OSError: the file is missing or cannot be read.
        StorageError: the file is damaged.
    """
    for attempt in range(_ATTEMPTS):
        content = folder.read(name)
        try:
            return pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
        except Exception as error:  # pyarrow raises many kinds for damaged bytes
            # An object store may have told the size of the old version and sent the new one.
            if attempt == _ATTEMPTS - 1:
                raise StorageError(
                    f"{folder.location}/{name}: damaged, not the Parquet file that rayfed wrote "
                    f"({one_line(error)[:120]}); restore it, or delete it and run its trials again"
                ) from error
    raise AssertionError


_ATTEMPTS = 3
