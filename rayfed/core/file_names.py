"""Names that experiments and trials may have, since files are named after them, and files that users name."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rayfed.core.errors import UsageError

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


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Make the folder of `path` before the body writes the file.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error
