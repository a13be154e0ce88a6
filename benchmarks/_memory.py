"""Memory of a benchmark's processes, watched while it runs."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil


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
