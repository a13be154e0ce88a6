"""Programs that only read, watched while they run: the files that their Python code opens to write, removes or renames.

    python -m helpers.watcher CALLS.json REPORT.json

calls functions, one after the other, and writes what `Watched` has of each. Libraries in C++ do not pass by Python's
audit hooks, so `fingerprint` compares whole folders as well.
"""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_CHANGES = {
    "open": [(0, None)],
    "os.chmod": [(0, 2)],
    "os.chown": [(0, 3)],
    "os.link": [(0, 2), (1, 3)],
    "os.mkdir": [(0, 2)],
    "os.remove": [(0, 1)],
    "os.rename": [(0, 2), (1, 3)],
    "os.rmdir": [(0, 1)],
    "os.setxattr": [(0, None)],
    "os.symlink": [(1, 2)],
    "os.truncate": [(0, None)],
    "os.utime": [(0, 3)],
}
"""By event of Python's audit hooks, the places of its paths and of the folders' descriptors that these belong to."""
Call = tuple[str, list[str]]
"""A function, MODULE:FUNCTION, and the list of arguments that it is called with."""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def fingerprint(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what changes when anything below `folder` is written, made or removed, even if it is made and removed."""
    paths = [folder, *folder.rglob("*")]
    found = {str(path.relative_to(folder)): path.lstat() for path in paths}
    return {name: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found.items()}


class Watched(NamedTuple):
    """A call: its exit code, the paths that it changed, whether it changed the working folder, and what it printed."""

    code: int
    changed: list[str]
    is_folder_changed: bool
    printed: str


def watched(calls: Mapping[str, Call], cwd: Path, scratch: Path) -> dict[str, Watched]:
    """Call functions in another process in the folder `cwd`; only files below `scratch` are theirs to write."""
    places = {"RAYFED_CACHE": "cache", "TMPDIR": "tmp", "MPLCONFIGDIR": "mpl", "HOME": "user"}
    environment = {key: str(scratch / place) for key, place in places.items()}
    for path in environment.values():
        Path(path).mkdir(parents=True)
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    (scratch / "calls.json").write_text(json.dumps(calls))
    command = [sys.executable, "-m", "helpers.watcher", scratch / "calls.json", scratch / "report.json"]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: Watched(*values) for name, values in json.loads((scratch / "report.json").read_text()).items()}
    free = (f"{scratch}/", "/dev/", "/proc/")
    return {
        name: call._replace(changed=[path for path in call.changed if not path.startswith(free)])
        for name, call in found.items()
    }


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make `folder` read-only in the body, for root as well, whom modes do not stop."""
    if os.geteuid():
        modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if not path.is_symlink()}
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        yield
        for path, mode in modes.items():
            path.chmod(mode)
        return
    mounted = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("needs the right to mount a folder read-only")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder, folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def written() -> set[str]:
    """Return a set to which the paths are added that this process changes from now on."""
    changed: set[str] = set()

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and not (isinstance(values[2], int) and values[2] & _TO_WRITE):
            return
        for path, folder in _CHANGES.get(event, ()):
            if isinstance(values[path], (str, bytes)):
                below = -1 if folder is None else values[folder]
                parent = os.readlink(f"/proc/self/fd/{below}") if below >= 0 else os.getcwd()
                changed.add(os.path.normpath(os.path.join(parent, os.fsdecode(values[path]))))

    sys.addaudithook(note)
    return changed


def _main(calls: str, report: str) -> None:
    changed = written()
    found = {}
    for name, (function, arguments) in json.loads(Path(calls).read_text()).items():
        before, printed = fingerprint(Path.cwd()), io.StringIO()
        changed.clear()
        module, _, attribute = function.partition(":")
        call = getattr(importlib.import_module(module), attribute)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = call(arguments)
        seen = sorted(changed)
        found[name] = Watched(code, seen, fingerprint(Path.cwd()) != before, printed.getvalue())
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
