"""What all readers of files share: the folders of datasets, a hash of the files, and one line about a damaged one."""

import contextlib
import functools
import hashlib
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rayfed.core.errors import UsageError, printable
from rayfed.core.paths import absolute, looked_in

ROOT_HELP = "folder of datasets; null: the environment variable RAYFED_DATA, else data"


def datasets_folder(root: str | None) -> Path:
    """Return the folder of datasets: `root`, else the environment variable RAYFED_DATA, else "data"."""
    return absolute(root or os.environ.get("RAYFED_DATA") or "data")


def existing(option: str, path: str | Path, expected: str, kind: str = "file") -> Path:
    """Return the absolute `path` of a user's file, or folder by `kind`; UsageError if there is none."""
    found = absolute(path)
    if kind == "folder":
        is_there = found.is_dir()
    else:
        is_there = found.is_file()
    if not is_there:
        problem = f"no such {kind}{looked_in(path)}"
        raise UsageError(f"{option}={path}: {problem}; {expected}")
    return found


def is_hidden(name: str) -> bool:
    """Return whether a file or a folder is none of the user's: hidden, or left by a system beside the user's files."""
    return name.startswith(".") or name.lower() in ("__macosx", "desktop.ini", "thumbs.db")


def files_below(folder: Path) -> list[Path]:
    """Return the sorted files in `folder` and in the folders below, without hidden files and folders."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    kept = []
    for path in paths:
        parts = path.relative_to(folder).parts
        if not any(map(is_hidden, parts)):
            kept.append(path)
    return kept


def tell_left_out(folder: Path, left_out: Counter[str]) -> None:
    """Print how many files of which kind below `folder` are not read."""
    count = left_out.total()
    if count:
        were = "files were"
        if count == 1:
            were = "file was"
        note(f"{folder}: {count} {were} left out: {in_words(left_out)}")


def in_words(left_out: Counter[str]) -> str:
    """Return numbers of files of each kind as a list in words, "2 .txt, 1 hidden"."""
    told = []
    for kind, number in left_out.most_common():
        if number:
            told.append(f"{number} {kind}")
    return ", ".join(told)


_listening: list[set[str]] = []


def note(line: str) -> None:
    """Print, once in a process, what a reader leaves out or changes."""
    for lines in _listening:
        lines.add(line)
    print_once(line)


@functools.cache
def print_once(line: str) -> None:
    print(f"rayfed: {printable(line)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def noted() -> Iterator[set[str]]:
    """Yield the lines that are noted in the body, also by its threads."""
    lines = set[str]()
    _listening.append(lines)
    try:
        yield lines
    finally:
        _listening.pop()


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file that a list names, in `folder` or below it; UsageError if it lies elsewhere."""
    if isinstance(name, str) and not name.startswith("/") and ".." not in name.split("/"):
        return folder / name
    raise UsageError(f"{folder}: its list names {name!r}, which is no file in this folder")


def _is_pipe_or_device(path: Path | str) -> bool:
    """Return whether there is something at `path` that is neither a file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # nothing, or no path
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextlib.contextmanager
def readable(path: Path | str, kind: str) -> Iterator[None]:
    """Raise UsageError, which names `path` and the expected `kind`, for any error while a file is read.

    Readers raise errors of many types for damaged files. A pipe or a device is refused before it is opened, since a
    reader could wait for it without end.
    """
    if _is_pipe_or_device(path):
        raise UsageError(f"{path}: a pipe or a device, not {kind}")
    with _errors_in_a_line(path, kind):
        yield


@contextlib.contextmanager
def _errors_in_a_line(path: Path | str, kind: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except MemoryError as error:
        raise UsageError(f"{path}: too large for the memory of this machine, or damaged; expected {kind}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: missing, empty, truncated, damaged or not {kind} ({reason})") from error


def files_hash(root: Path, files: Sequence[str]) -> str:
    """Return the SHA-256 of `root` and the name, size and modification time of each of its `files`.

    The folder is included, as a copy of it with other pixels may have the same names, sizes and times.
    """
    digest = hashlib.sha256(f"{root.resolve()}\0".encode())
    for file in files:
        with _errors_in_a_line(root / file, "a file"):
            status = os.stat(root / file)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("a folder, a pipe or a device")
        state = f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(state.encode())
    return digest.hexdigest()
