"""The folder in which a command was given: relative paths belong to it in all processes of the command.

Ray starts processes in folders of its own, and on a machine of a cluster the folder may not exist.
"""

import contextlib
import os
from pathlib import Path

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
    """Return the path that the user calls `path`: ~ is the home, and a relative path is in the working folder."""
    return working_folder() / Path(path).expanduser()


def lasting(path: str | Path) -> str:
    """Return `path`, below the home if it is relative and Ray Jobs copied the working folder: Ray deletes the copy."""
    copied = _RAYS_COPIES in working_folder().parts and "://" not in str(path)
    return str(Path.home() / path if copied else path)


def looked_in(path: str | Path) -> str:
    """Return " in FOLDER" for the message that a relative `path` does not exist, "" if it is absolute."""
    return "" if Path(path).expanduser().is_absolute() else f" in {working_folder()}"
