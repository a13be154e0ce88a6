"""Processes on the nodes of the cluster: where this one is, and how one is killed that answers no request."""

import contextlib
import os
import signal
import traceback
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.experiments.capacity import ray_folder

Process = tuple[int, str]
"""A process id, and the id of the Ray node."""

_KILL_SECONDS = 60.0  # until a node that does not run the task counts as gone


def this_process() -> Process:
    """Return the process that calls this."""
    return os.getpid(), ray.get_runtime_context().get_node_id()


def kill_process(process: Process) -> None:
    """Kill a process on its node. It may be stopped, and then does not react to Ray's own requests.

    If the node is gone, or goes meanwhile, the process is gone with it.
    """
    pid, node = process
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
    elif any(known["NodeID"] == node and known["Alive"] for known in ray.nodes()):
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task: Any = ray.remote(_kill)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(task.options(num_cpus=0, scheduling_strategy=there).remote(pid), timeout=_KILL_SECONDS)


def lost_its_node(error: BaseException) -> bool:
    """Return whether Ray's core raised `error` in this process because its node is gone: Ray ends the process soon."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return isinstance(error, OSError) and bool(frames) and frames[-1][0].f_code.co_filename.endswith((".pyx", ".pxi"))


def log_folder() -> str:
    """Return the folder of the log files of the last Ray session on this machine."""
    return f"{ray_folder()}/session_latest/logs"


def cause_of_death(error: BaseException) -> str:
    """Return in a few words why an actor died, from the paragraph in which Ray says so, or what it raised last."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return str(error.cause).splitlines()[0][:160]
    text = " ".join(str(error).split())
    if "OutOfMemory" in type(error).__name__ or "low on memory" in text:
        return "its node ran out of memory"
    if "node" in text and ("terminated" in text or "died" in text.partition("node")[2][:80]):
        return "its node died"
    if any(words in text for words in ("SYSTEM_ERROR", "Socket closed", "is unavailable")):
        return "its process was killed or crashed"
    reason = text.rpartition("The actor is dead because ")[2] or type(error).__name__
    return reason.partition(". ")[0][:160]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
