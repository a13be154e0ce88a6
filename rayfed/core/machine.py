"""What the machine offers to this process: memory, GPUs, packages and signals."""

import gc
import importlib.metadata
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def memory_bytes() -> int:
    """Return the memory of the machine in bytes, or the memory limit of the container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _LIMITS):
        if not path.is_file():
            continue
        text = path.read_text().strip()
        if text.isdigit():
            sizes.append(int(text))
    return min(sizes)


class Process(NamedTuple):
    """A process of a trial on Ray: the id of its node, its own id there, and the ids of the GPUs that it has."""

    node: str
    pid: int
    gpus: tuple[str, ...] = ()


def nvidia_smi(fields: str, of: str = "gpu", *, gpu: str | None = None) -> str:
    """Return a line with fields of each GPU, or of each process with `of="compute-apps"`; "" without a driver.

    With `gpu`, the line is of the GPU with this id alone; "" if the GPU does not answer.
    """
    command = ["nvidia-smi", f"--query-{of}={fields}", "--format=csv,noheader"]
    if gpu is not None:
        command.append(f"--id={gpu}")
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return done.stdout.strip()
    return ""


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for a package that is not installed."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    found |= dict.fromkeys(packages)
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@contextmanager
def importing() -> Iterator[None]:
    """Import large packages in this block, such as torch. Searches for garbage would take a tenth to a fifth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def on_signal(
    number: signal.Signals, act: Callable[[int, Any], None], then: signal.Handlers | Callable[[int, Any], Any]
) -> Iterator[None]:
    """Call `act` with the number and the frame at the first such signal in this block, and handle later ones by `then`.

    Only the main thread handles signals, so the block changes nothing in another thread, nor where the signal is
    ignored.
    """
    before = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return

    def first(number: int, frame: Any) -> None:
        signal.signal(number, then)
        act(number, frame)

    signal.signal(number, first)
    try:
        yield
    finally:
        signal.signal(number, before)
