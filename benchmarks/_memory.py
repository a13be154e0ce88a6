"""Memory of a benchmark's processes, watched while it runs."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

ROLES = {"RayHost": "host", "ServerActor": "server", "Recorder": "recorder"}
"""What a process of rayfed does, by how Ray calls it."""


@contextlib.contextmanager
def watching(sample: Callable[[Sequence[psutil.Process]], object], every: float = 0.5) -> Iterator[None]:
    """Call `sample` every `every` seconds, in a thread, with this process and all of its descendants."""
    ended = threading.Event()

    def watch() -> None:
        this = psutil.Process()
        while not ended.wait(every):
            sample([this, *this.children(recursive=True)])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def shared_fairly(process: psutil.Process) -> int:
    """Return the proportional set size of a process in bytes, in which a page that n processes share counts 1/n."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0


def sizes(process: psutil.Process) -> dict[str, int]:
    """Return the bytes in /proc/PID/status by name, such as RssAnon and VmRSS; none once the process has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def role(process: psutil.Process) -> str | None:
    """Return the role of a Ray actor's process, one of the values of `ROLES`; None for other processes."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return None
    return next((role for kind, role in ROLES.items() if title.startswith(f"ray::{kind}")), None)


def most_private(run: Callable[[], object]) -> dict[str, int]:
    """Return the anonymous memory of the process with the most of it in each role, in bytes, while `run` runs."""
    most: dict[str, int] = {}

    def sample(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            if (kind := role(process)) is not None:
                most[kind] = max(most.get(kind, 0), sizes(process).get("RssAnon", 0))

    with watching(sample, every=0.02):
        run()
    return most
