"""What Ray has no public way for, in one file. Tests run it with the lowest version of Ray that is allowed, too."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from ray._private import ray_constants, services, worker

_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; at 0, it uses loopback on every system


@contextlib.contextmanager
def patient_start(seconds: float) -> Iterator[None]:
    """Within, give Ray's own processes `seconds` to start, in place of the 30 that are fixed in `ray.init`."""
    get_node: Any = services.get_node

    def patient(*arguments: Any, **keywords: Any) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                return get_node(*arguments, **keywords)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    services.get_node = patient
    try:
        yield
    finally:
        services.get_node = get_node


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Within, let a session that is started, with all of its processes, use the address of the loopback interface.

    `ray.init` takes the machine's address also where no other machine takes part, so that its ports are open to the
    network.
    """
    before, enabled = os.environ.get(_LOOPBACK_VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_LOOPBACK_VARIABLE], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # for the processes, and for this one
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            os.environ.pop(_LOOPBACK_VARIABLE)
        else:
            os.environ[_LOOPBACK_VARIABLE] = before


def keep_raylet_messages_in_the_log() -> None:
    """Do not print Ray's paragraph on each process that dies, which `log_to_driver=False` does not decline.

    rayfed says in one line what is done about it.
    """
    emit: Any = worker.print_to_stdstream

    def filtered(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        if data.get("pid") != "raylet":
            emit(data, *arguments, **keywords)

    worker.print_to_stdstream = filtered
