"""Whether a process does anything, or waits for something that does not come."""

import contextlib
import threading
import time
from pathlib import Path


class Activity:
    """Notices a deadlock: no thread of Python has used the processor between two looks, and there is no other process
    that it may be waiting for.

    The thread that looks does not count, and neither do Ray's threads, which are none of Python's. Waiting for results
    of Ray counts as work, since Ray looks for signals every second meanwhile.
    """

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def moved(self) -> bool:
        """Return whether something was done since the last call; true where the system does not tell."""
        before, self._before = self._before, _thread_seconds()
        return not self._before or self._before != before or _has_children()


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
