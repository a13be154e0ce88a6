"""The folder of the Ray sessions that rayfed starts by itself, which only its user may enter.

Ray lets everybody on the machine read the logs of a session and write to its sockets: it makes its own folders
accessible to all, whatever the umask. So they lie in a folder that is not.
"""

import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from rayfed.core.errors import UsageError
from rayfed.experiments.capacity import ray_folder

_MOST_BYTES = 107
"""The longest path of a socket."""
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of a socket below the folder of this user."""


def session_folder() -> Path:
    """Return the folder for the sessions, which is made if needed.

    Raises:
        UsageError: RAY_TMPDIR is too long for the paths of sockets.
        OSError: The folder cannot be made.
    """
    place = temporary_folder()
    place.mkdir(parents=True, exist_ok=True)
    if _is_private(place):
        return place / "ray"
    folder = place / _name()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        folder = _new_folder(str(place))
    return folder / "ray"


def temporary_folder() -> Path:
    """Return the folder in which the user's own folder lies: Ray's temporary one, or /tmp if TMPDIR is too long.

    Raises:
        UsageError: RAY_TMPDIR is too long for the paths of sockets.
    """
    place = ray_folder().parent
    names = ""
    if not _is_private(place):
        names = f"/{_name()}"
    most = _MOST_BYTES - len(names) - len(_SOCKET)
    if len(os.fsencode(place)) <= most:
        return place
    if "RAY_TMPDIR" in os.environ:
        remedy = f"use a path of at most {most} bytes"
        if names:
            remedy += f", or chmod 700 for one of {most + len(names)}"
        raise UsageError(f"RAY_TMPDIR={place}: too long for the paths of Ray's sockets; {remedy}")
    return Path("/tmp")


def _name() -> str:
    return f"rayfed-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Return whether a folder belongs to this user, and no other user may enter it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_closed


@functools.cache
def _new_folder(place: str) -> Path:
    """Return a folder for this process alone, where somebody else has made that with the user's name."""
    return Path(tempfile.mkdtemp(prefix="r", dir=place))
