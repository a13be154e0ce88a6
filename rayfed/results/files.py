"""Names that experiments and trials may have, and replacing a Parquet file in one step."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.errors import UsageError


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be the name of a file that Parquet readers see.

    Readers skip names that begin with "." or "_", which also hides unfinished files from them.

    Raises:
        UsageError: the name cannot be used; the message begins with `what`.
    """
    if not name or name[0] in "._" or any(letter in '/\\:*?"<>|' or not letter.isprintable() for letter in name):
        raise UsageError(f'{what}={name!r}: use a name without / \\ : * ? " < > | that does not begin with . or _')
    return name


def replace_parquet(table: pa.Table, path: Path) -> None:
    """Write `table` to `path`, which at every moment holds either the old rows or the new ones, and never a part.

    Only one process may write to a `path` at a time. A crash leaves a hidden file, which the next call overwrites.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut may leave the new name without content
    os.replace(unfinished, path)
