"""Names and files of the results: what a trial may be called, and how a Parquet file is replaced in one step."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.errors import UsageError


def check_name(name: str, what: str) -> str:
    """`name`, where it can be a file's name that Parquet readers see; `UsageError` otherwise.

    Readers pass over names that begin with "." or "_"; that is also what hides our unfinished files from them.
    """
    if not name or name[0] in "._" or any(letter in '/\\:*?"<>|' or not letter.isprintable() for letter in name):
        raise UsageError(f'{what}={name!r}: use a name without / \\ : * ? " < > | that does not begin with . or _')
    return name


def replace_parquet(table: pa.Table, path: Path) -> None:
    """Writes `table` to `path`, which holds the old rows or the new ones at every moment, and never a part of them.

    Only one writer may do this for one `path` at a time. A crash leaves a hidden file, which the next call reuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())  # without it a power cut may leave the new name with no content
    os.replace(unfinished, path)
