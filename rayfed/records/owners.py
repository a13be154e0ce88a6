"""Which process runs a trial: an owner, which holds a lock for as long as its process lives.

The system releases the lock however the process dies. So a trial was lost if its status is `running` and its owner's
lock is free. The locks work between machines if their file system has working locks. Object stores have none: there,
nobody knows whether an owner is alive, and two commands must not write to one experiment at a time.

Who only reads looks at the locks and changes nothing. A command that begins trials removes what dead owners left.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock

from rayfed.core.paths import read_file
from rayfed.records.storage import Storage

_OWNERS = ".owners"
_NAME = re.compile(r"(?P<host>\S+) (?P<pid>[0-9]+) (?P<started>\S+) (?P<key>[0-9a-f]{8})")
_FILE = re.compile(r"[0-9a-f]{8}\.json")


class Owner:
    """The claim of this process to the trials that it runs. It ends with the object, or with the process.

    Args:
        home: The folder of the experiment.
        trials: The trials that the process is going to run, for other commands to read.

    Attributes:
        name: The value of the column `owner` in `trials`.
    """

    def __init__(self, home: Storage, trials: Iterable[str] = ()):
        started = time.strftime("%Y-%m-%dT%H:%M:%S")
        process = f"{socket.gethostname()} {os.getpid()}"
        self.name = f"{process} {started} {secrets.token_hex(4)}"
        self._file: Path | None = None
        if home.local is None:
            return
        self._file = _owner_file(home.local, self.name)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # The lock is a file of its own, because taking a lock may empty the file.
        self._lock = FileLock(_lock_file(self._file), thread_local=False)
        self._lock.acquire(timeout=0)
        self._file.write_text(json.dumps({"owner": self.name, "trials": list(trials)}))

    def release(self) -> None:
        """End the claim. Files that cannot be removed stay, and their free lock says that the owner has ended."""
        if self._file is None:
            return
        file = self._file
        self._file = None
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        self._lock.release()  # before its file goes, because some systems keep open files
        with contextlib.suppress(OSError):
            _lock_file(file).unlink(missing_ok=True)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


def is_owner(name: object) -> bool:
    """Return whether `name` is one that `Owner` makes. Other names may come from a table of somebody else."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_alive(home: Storage, owner: str) -> bool | None:
    """Return whether the process that `owner` names is alive; None if nobody knows, as in an object store.

    Nothing is written or removed.
    """
    if home.local is None:
        return None
    file = _owner_file(home.local, owner)
    return file.exists() and _is_locked(_lock_file(file))


def claims(home: Storage) -> Iterator[tuple[str, set[str]]]:
    """Yield each owner that is alive in the experiment in `home`, with the trials that it is going to run."""
    for file in _owner_files(home):
        try:
            content = json.loads(read_file(file))
            owner = content["owner"]
            trials = {str(trial) for trial in content["trials"]}
        except (OSError, ValueError, KeyError, TypeError):  # the owner has ended, or has not yet written its claim
            continue
        if trials and is_owner(owner) and is_alive(home, owner):
            yield owner, trials


def remove_dead(home: Storage) -> None:
    """Remove the files of owners that have died. Their names are used once, so nobody locks them again."""
    for file in _owner_files(home):
        if not _is_locked(_lock_file(file)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                _lock_file(file).unlink(missing_ok=True)


def describe(owner: str) -> str:
    """Return the owner in words: "process 7 on HOST since …"."""
    name = _parts(owner)
    since = name["started"].replace("T", " ")
    return f"process {name['pid']} on {name['host']} since {since}"


def _parts(owner: str) -> re.Match[str]:
    match = _NAME.fullmatch(owner)
    if match is None:
        raise ValueError(f"{owner!r} names no owner")
    return match


def _owner_file(home: Path, owner: str) -> Path:
    return home / _OWNERS / f"{_parts(owner)['key']}.json"


def _lock_file(owner_file: Path) -> Path:
    return owner_file.with_suffix(".lock")


def _owner_files(home: Storage) -> list[Path]:
    """Return the files of all owners, alive or dead."""
    if home.local is None:
        return []
    files = (home.local / _OWNERS).glob("*.json")
    return [file for file in files if _FILE.fullmatch(file.name)]


def _is_locked(file: Path) -> bool:
    """Return whether a process holds the lock of `file`, or nobody may ask. A shared lock needs no right to write."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # also where the file system has no locks
        return True
    finally:
        os.close(descriptor)
    return False
