"""How a command that uses Ray ends from outside: its Ray session ends, as after `ray stop`, or SIGTERM comes.

Ray's core ends a process without its raylet after about two seconds, from a thread of its own, so that no exception
tells what happened. This is therefore noticed first, by a thread that looks whether the raylet answers. A raylet ends
when the head of its cluster has been gone for a minute.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import ray

from rayfed.core.errors import HostLost
from rayfed.core.sigterm import on_sigterm
from rayfed.experiments.progress import note

Address = tuple[str, int]

_LOOK_SECONDS = 0.25
_CONNECT_SECONDS = 5.0


@contextlib.contextmanager
def watching_session(continues: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Within, end this process with exit code 1 and one line when its Ray session is gone.

    Args:
        continues: How to go on, as the end of that line.

    Yields:
        A function that prints a line on what happened to a process; but not if `quiet`, and not what follows from the
        end of the session.

    Raises:
        HostLost: In place of an exception that the session's end has caused in this thread.
    """
    raylet = _raylet()
    line = f"Ray has ended on this machine, as after ray stop; everything recorded before that is kept, and {continues}"
    over = threading.Event()
    if raylet is not None:
        threading.Thread(target=watch, args=(raylet, over, lambda: _end_process(line)), daemon=True).start()

    def say(line: str) -> None:
        if not quiet and not is_gone(raylet):
            note(line)

    try:
        yield say
    except Exception as error:
        over.set()
        if is_gone(raylet):
            raise HostLost(line) from error
        raise
    finally:
        over.set()


def watch(raylet: Address, over: threading.Event, end: Callable[[], None]) -> None:
    """Look until `over` is set, or call `end` once the raylet is gone."""
    while not over.wait(_LOOK_SECONDS):
        if is_gone(raylet):
            if not over.is_set():
                end()
            return


def is_gone(raylet: Address | None) -> bool:
    """Return whether the raylet refuses connections. One that is busy accepts them late, and has not ended."""
    if raylet is None:
        return False
    try:
        socket.create_connection(raylet, timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _raylet() -> Address | None:
    """Return where the raylet of this machine listens; None for a client of a cluster's proxy (ray://)."""
    if ray.util.client.ray.is_connected():
        return None
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return node["NodeManagerAddress"], int(node["NodeManagerPort"])


def ended_by_sigterm(end: Callable[[], str]) -> "contextlib.AbstractContextManager[None]":
    """Within, end this process at SIGTERM, with exit code 143 and the line that `end()` returns.

    Ray is not asked for anything: where a whole job is ended, as by SLURM and `timeout`, its processes get the signal,
    too, and end with pages of messages. Those that do not get it end with this one.
    """
    return on_sigterm(lambda number, frame: _end_process(end(), 128 + number))


def _end_process(line: str, code: int = 1) -> None:
    """End this process, in which other threads may wait for Ray for ever."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")  # clears the line of progress, and shows the cursor again
    print(f"rayfed: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
