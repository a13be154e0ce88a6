"""Paths that users give, files that users name, and names from which files are made.

A relative path belongs to the folder in which the command was given, in all processes of the command. Ray starts
processes in folders of its own, and on a machine of a cluster the folder may not exist.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rayfed.core.errors import UsageError

MOST_BYTES = 200
"""The longest name. File systems allow 255 bytes, and files add a few characters to the name."""
_RAYS_COPIES = "working_dir_files"  # the folder of Ray's copies of a working_dir, in that of a session
_entered: Path | None = None


def working_folder() -> Path:
    """Return the folder in which the command was given; in the command's own process, the working directory."""
    return _entered or Path.cwd()


def enter(folder: Path) -> None:
    """Make `folder` the working folder of this process, and its working directory where the folder exists."""
    global _entered
    _entered = folder
    with contextlib.suppress(OSError):
        os.chdir(folder)


def absolute(path: str | Path) -> Path:
    """Return the path that the user calls `path`: ~ is the home, and a relative path is in the working folder.

    Raises:
        UsageError: As `expanded` does.
    """
    return working_folder() / expanded(path)


def expanded(path: str | Path) -> Path:
    """Return `path` with ~ as the home, where there is one.

    Raises:
        UsageError: No file can have this name, for example because it is too long.
    """
    found = Path(os.path.expanduser(path))
    try:
        os.lstat(found)
    except ValueError as error:  # bytes that no name has
        raise UsageError(f"{path}: no file can have this name ({error})") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{path}: no file can have this name ({error.strerror})") from error
    return found


def lasting(path: str | Path) -> str:
    """Return `path`, below the home if it is relative and Ray Jobs copied the working folder: Ray deletes the copy."""
    copied = _RAYS_COPIES in working_folder().parts and "://" not in str(path)
    if copied:
        return str(Path.home() / path)
    return str(path)


def looked_in(path: str | Path) -> str:
    """Return " in FOLDER" for the message that a relative `path` does not exist, "" if it is absolute."""
    if expanded(path).is_absolute():
        return ""
    return f" in {working_folder()}"


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be the name of a file that Parquet readers see.

    Readers skip names that begin with "." or "_", which also hides unfinished files from them.

    Raises:
        UsageError: The name cannot be used; the message begins with `what`.
    """
    is_begun_well = bool(name) and name[0] not in "._"
    if not is_begun_well or any(letter in '/\\:*?"<>|' or not letter.isprintable() for letter in name):
        raise UsageError(f'{what}={name!r}: use a name without / \\ : * ? " < > | that does not begin with . or _')
    length = len(name.encode())
    if length > MOST_BYTES:
        raise UsageError(f"{what}={name[:20]}…: a name of {length} bytes; use at most {MOST_BYTES}")
    return name


def read_file(path: str | Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: There is no file. A pipe or a device is none: a reader could wait for it without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Make the folder of `path` before the body writes the file.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        expanded(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error
