"""Who runs a trial: a lock that its recorder holds for as long as it lives.

The system releases the lock when a process dies, however it dies. So a trial was lost if its status is `running` and
its owner's lock is free. Locks work between machines if their file system has working locks. Object stores have none,
so nobody knows there whether an owner is alive.

Before a command starts, it claims all trials that it is going to run, in a file of its own with their names. So two
commands never begin the same trial; see `rayfed.records.trials.claimed`.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from rayfed.records.storage import Storage

FOLDER = ".owners"
_LOOK_SECONDS = 0.1
"""How long to try for a lock: another process that looks at it holds it for a moment, and is not its owner."""


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
        self._file: Path | None = None
        if home.local is None:
            return
        self._file = _file(home.local, self.name)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._file)
        self._lock.acquire(timeout=0)
        self._file.write_text(json.dumps({"owner": self.name, "trials": list(trials)}))

    def release(self) -> None:
        """End the claim."""
        if self._file is not None:
            _forget(self._file, self._lock)
            self._file = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


def is_alive(home: Storage, owner: str) -> bool | None:
    """Return whether the process that `owner` names still runs trials of the experiment in `home`; None: unknown."""
    if home.local is None:
        return None
    file = _file(home.local, owner)
    if not file.exists():
        return False
    lock = _lock(file)
    try:
        lock.acquire(timeout=_LOOK_SECONDS, poll_interval=_LOOK_SECONDS / 10)
        _forget(file, lock)  # names are used once, so nobody locks it again
    except (Timeout, OSError):  # an OSError of a read-only folder: the trial may be running
        return True
    return False


def claims(home: Storage) -> Iterator[tuple[str, set[str]]]:
    """Yield each owner that is alive in the experiment in `home`, with the trials that it is going to run."""
    if home.local is None:
        return
    for path in (home.local / FOLDER).glob("*.json"):
        try:
            content = json.loads(path.read_bytes())
            owner, trials = str(content["owner"]), {str(trial) for trial in content["trials"]}
        except (OSError, ValueError, KeyError, TypeError):  # the owner has ended, or not yet written its claim
            continue
        if trials and is_alive(home, owner):
            yield owner, trials


def describe(owner: str) -> str:
    """Return the owner in words: "process 7 on HOST since …"."""
    host, pid, started, _ = owner.split(" ")
    return f"process {pid} on {host} since {started.replace('T', ' ')}"


def _file(home: Path, owner: str) -> Path:
    return home / FOLDER / f"{owner.rpartition(' ')[2]}.json"


def _lock(file: Path) -> FileLock:
    """Return the lock of an owner, in a file of its own: taking a lock empties its file."""
    return FileLock(file.with_suffix(".lock"), thread_local=False)


def _forget(file: Path, lock: FileLock) -> None:
    """Remove the files of an owner that has ended, and release its lock."""
    file.unlink(missing_ok=True)
    lock.release()  # before the file goes, because Windows keeps open files
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink(missing_ok=True)
