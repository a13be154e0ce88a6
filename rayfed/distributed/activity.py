"""Whether a process does anything, or waits for something that does not come."""

import contextlib
import threading
import time
from pathlib import Path

_IDLE_SHARE = 0.05  # of a processor, which the threads of Ray and gRPC stay below in a process that does nothing


class Activity:
    """Notices a deadlock: no thread of Python has used the processor between two looks, threads of libraries have not
    used more of it than those of Ray do, and there is no other process that this one may be waiting for.

    The thread that looks does not count. Waiting for results of Ray counts as work, since Ray looks for signals every
    second meanwhile.
    """

    def __init__(self) -> None:
        self._threads: dict[int, float] = {}
        self._process, self._time = 0.0, 0.0

    def moved(self) -> bool:
        """Return whether something was done since the last call; true where the system does not tell."""
        threads, process, now = _thread_seconds(), time.process_time(), time.monotonic()
        share = (process - self._process) / max(now - self._time, 1e-9)
        same = threads == self._threads
        self._threads, self._process, self._time = threads, process, now
        return not threads or not same or share > _IDLE_SHARE or _has_children()


def _thread_seconds() -> dict[int, float]:
    """Return the seconds on the processor of each thread of Python except the one that calls."""
    seconds: dict[int, float] = {}
    for thread in threading.enumerate():
        if thread.ident is None or thread is threading.current_thread():
            continue
        with contextlib.suppress(OSError, AttributeError):  # it has just ended; not every system has the clock
            seconds[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return seconds


def _has_children() -> bool:
    try:
        return any(file.read_text().strip() for file in Path("/proc/self/task").glob("*/children"))
    except OSError:  # a thread has just ended
        return True
