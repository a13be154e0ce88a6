"""The processes of this Ray session, to kill or stop them."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import ActorTableData


def processes(title: str) -> list[int]:
    """Return the ids of this session's worker processes whose title begins with `ray::` and `title`."""
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    by_parent: dict[int, list[int]] = {}
    raylets = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if "raylet/raylet" in command.split(" ")[0] and session in command:
            raylets.append(int(folder.name))
        if command.startswith(f"ray::{title}"):
            by_parent.setdefault(parent, []).append(int(folder.name))
    return [pid for raylet in raylets for pid in by_parent.get(raylet, [])]


def actor_names(kind: str) -> set[str]:
    """Return what the dashboard calls the actors of a class, dead ones too."""
    accessor = state._connect_and_get_accessor()
    infos = [accessor.get_actor_info(ray.ActorID.from_hex(number)) for number in ray._private.state.actors()]
    actors = [ActorTableData.FromString(info) for info in infos]
    return {actor.repr_name for actor in actors if actor.class_name == kind}


def wait_until(ready: Callable[[], object], seconds: float = 120) -> None:
    """Wait until `ready()` is true.

    Raises:
        TimeoutError: it was not within `seconds`.
    """
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.05)


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread; wait for its end, and fail if it raised an error."""
    errors = []

    def called() -> None:
        try:
            act()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=called)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert errors == []


def send(title: str, number: int) -> int:
    """Send a signal to the one process with `title`, and return its id."""
    found: list[int] = []

    def only_one() -> bool:
        found[:] = processes(title)
        return len(found) == 1

    wait_until(only_one)
    os.kill(found[0], number)
    return found[0]
