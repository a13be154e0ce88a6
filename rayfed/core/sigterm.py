"""What SIGTERM does, as SLURM, Kubernetes and `timeout` send it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_sigterm(act: Callable[[int, Any], None]) -> Iterator[None]:
    """Within, call `act` with the signal and the frame at the first SIGTERM, and ignore others.

    `timeout` sends it to the process and to its group. Signals are handled in the main thread only; in another one,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        act(number, frame)

    before = signal.signal(signal.SIGTERM, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
