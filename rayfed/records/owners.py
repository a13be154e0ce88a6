"""Who runs a trial: a file that its recorder keeps locked for as long as it lives.

The system gives the lock back when a process dies, however it dies, so a trial whose status is `running` and whose
owner's file is not locked was lost. Locks work between machines if their file system has working locks. Object stores
have none, so there nobody knows whether an owner is alive.

A command claims all trials that it is going to run before it starts, in a file of its own with their names, so that two
commands never begin the same trial; see `rayfed.records.trials.claimed`.
"""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from rayfed.records.storage import LocalStorage, Storage

FOLDER = ".owners"


class Owner:
    """The claim of this process to the trials that it runs; it ends with the object, or with the process.

    Args:
        home: The folder of the experiment.
        trials: The trials that the process is going to run, for other commands to read.

    Attributes:
        name: What stands in the column `owner` of `trials`.
    """

    def __init__(self, home: Storage, trials: Iterable[str] = ()):
        started = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.name = f"{socket.gethostname()} {os.getpid()} {started} {secrets.token_hex(4)}"
        self._file: BinaryIO | None = None
        if not isinstance(home, LocalStorage):
            return
        self._path = _path(home, self.name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        if not _try_lock(self._file.fileno()):
            raise OSError(f"{self._path}: cannot be locked")
        self._file.write(json.dumps({"owner": self.name, "trials": list(trials)}).encode())
        self._file.flush()

    def release(self) -> None:
        """End the claim."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


def is_alive(home: Storage, owner: str) -> bool | None:
    """Return whether the process that `owner` names still runs trials of the experiment in `home`; None: unknown."""
    if not isinstance(home, LocalStorage):
        return None
    path = _path(home, owner)
    try:
        with open(path, "r+b") as file:
            held = not _try_lock(file.fileno(), shared=True)  # readers do not take each other for the owner
    except FileNotFoundError:
        return False
    except OSError:  # a folder that may only be read: do not call lost what may be running
        return True
    if not held:
        path.unlink(missing_ok=True)  # names are used once, so nobody locks it again
    return held


def claims(home: Storage) -> Iterator[tuple[str, set[str]]]:
    """Yield each owner that is alive in the experiment in `home`, with the trials that it is going to run."""
    if not isinstance(home, LocalStorage):
        return
    for path in (home.path / FOLDER).glob("*"):
        try:
            content = json.loads(path.read_bytes())
            owner, trials = str(content["owner"]), {str(trial) for trial in content["trials"]}
        except (OSError, ValueError, KeyError, TypeError):  # it has ended, or has not said yet what it claims
            continue
        if trials and is_alive(home, owner):
            yield owner, trials


def describe(owner: str) -> str:
    """Return who `owner` is, in words."""
    host, pid, started, _ = owner.split(" ")
    return f"process {pid} on {host} since {started.replace('T', ' ')}"


def _path(home: LocalStorage, owner: str) -> Path:
    return home.path / FOLDER / owner.rpartition(" ")[2]


_try_lock: Callable[..., bool]
if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
