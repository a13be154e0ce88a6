"""Ray's internals and the meaning of its errors, in one file. Tests also run it with the lowest version of Ray."""

import contextlib
import os
import traceback
from collections.abc import Iterator

import ray
from ray._private import ray_constants
from ray._private.state import state

from rayfed.core.errors import HostLost

_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; at 0, it uses loopback on every system


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Within, let a session that is started use the address of the loopback interface.

    `ray.init` uses the machine's address, which opens the ports of the session to the network.
    """
    before = os.environ.get(_LOOPBACK_VARIABLE)
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    # for the processes, and for this one
    os.environ[_LOOPBACK_VARIABLE] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            os.environ.pop(_LOOPBACK_VARIABLE)
        else:
            os.environ[_LOOPBACK_VARIABLE] = before


class PreemptedHost(HostLost, ray.exceptions.RayActorError):
    """A host died because its node was taken away. Ray Tune does not count such losses."""

    def __init__(self, message: str):
        ray.exceptions.RayActorError.__init__(self, error_msg=message, preempted=True)


def is_preempted(error: BaseException | None) -> bool:
    """Return whether a process died because its node was taken away, as Ray knows where the cluster announces that."""
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    return isinstance(error, ray.exceptions.RayActorError) and bool(error.preempted)


def keep_credentials_here() -> None:
    """Let Tune not copy credentials of AWS from this process's environment into what it sends to Ray.

    Ray writes that to a log. Processes that need the credentials find them as on any machine.
    """
    from ray.tune.execution import class_cache  # imports pandas, which some processes need not

    names: set[str] = class_cache.ENV_VARS_TO_PROPAGATE
    names.difference_update([name for name in names if name.startswith("AWS_")])


def most_resources() -> dict[str, float] | None:
    """Return what all nodes together would have that an autoscaler may start; None without one, or without a limit."""
    try:
        most = state.get_max_resources_from_cluster_config()
    except Exception:  # of versions of Ray that have no such function
        return None
    if most is None:
        return None
    return {name: float(amount) for name, amount in most.items()}


def lost_its_node(error: BaseException) -> bool:
    """Return whether Ray's core raised `error` in this process because its node is gone: Ray ends the process soon."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, OSError) or not frames:
        return False
    return frames[-1][0].f_code.co_filename.endswith((".pyx", ".pxi"))


def cause_of_death(error: BaseException) -> str:
    """Return in a few words why an actor died, from Ray's paragraph on it, or the message of what it raised."""
    if isinstance(error, ray.exceptions.ObjectLostError):
        return "it needs what was lost with another host"
    if isinstance(error, ray.exceptions.RayTaskError):
        if isinstance(error.cause, ray.exceptions.RayError):
            return cause_of_death(error.cause)
        cause = str(error.cause) or type(error.cause).__name__
        return cause.splitlines()[0][:160]
    if isinstance(error, HostLost):
        return str(error)
    if is_preempted(error):
        return "its node was taken away"
    text = " ".join(str(error).split())
    if "OutOfMemory" in type(error).__name__ or "low on memory" in text:
        return "its node ran out of memory"
    _, node, after = text.partition("node")
    if node and ("terminated" in text or "died" in after[:80]):
        return "its node died"
    if any(words in text for words in ("SYSTEM_ERROR", "Socket closed", "is unavailable")):
        return "its process was killed or crashed"
    reason = text.rpartition("The actor is dead because ")[2] or type(error).__name__
    return reason.partition(". ")[0][:160]
