"""Whether a process that has been silent for long still works. Its node is asked.

Ray notices processes that die. It does not notice one that is stopped, or that waits for a GPU that is gone: such a
process would hold its trial for ever.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.core.machine import Process, nvidia_smi

LOOK_SECONDS = 10
"""How long a silent process is watched."""
TIMES_PREDICTED = 10
"""A call is late when it takes this many times its prediction, and longer than `faults.patience`."""
_ANSWER_SECONDS = 90.0  # for an answer; a node that is gone gives none, which Ray notices
# states of a process in Linux
_STOPPED = "Tt"
_UNINTERRUPTIBLE = "D"
_DEAD = "ZX"


def this_process() -> Process:
    """Return this process of Ray."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    own_gpus = tuple(map(str, gpus))
    return Process(node=context.get_node_id(), pid=os.getpid(), gpus=own_gpus)


def end_if_stuck(process: Process) -> Any:
    """Let the node of a silent process watch it, and end it if it does not work; return the call for `reason`."""
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    watch: Any = ray.remote(watched_and_ended)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return watch.options(**options).remote(process.pid, process.gpus)


def reason(call: Any, timeout: float = _ANSWER_SECONDS) -> str:
    """Return why a process was ended; "" if it works, or if its node does not answer."""
    try:
        answer: str = ray.get(call, timeout=timeout)
    except ray.exceptions.RayError:
        return ""
    return answer


def watched_and_ended(pid: int, gpus: tuple[str, ...] = (), seconds: float = LOOK_SECONDS) -> str:
    """Watch a process of this machine, and end it if it does not work.

    A process that waits is taken to work: nobody knows what for.

    Args:
        gpus: The GPUs that the process has reserved, by their ids for nvidia-smi.

    Returns:
        Why it was ended; "" if it works.
    """
    found = _watched(pid, seconds)
    if not found and any(not nvidia_smi("uuid", gpu=gpu) for gpu in gpus):
        found = "its GPU does not answer"
    if found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)  # a process that is stopped keeps its memory until then
    return found


class _Look(NamedTuple):
    """The state of a process, a letter of Linux, and the ticks for which it has used a CPU."""

    state: str
    ticks: int


def _watched(pid: int, seconds: float) -> str:
    looks: list[_Look] = []
    end = time.monotonic() + seconds
    while not looks or time.monotonic() < end:
        try:
            looks.append(_look(pid))
        except OSError:
            return "its process is gone"
        time.sleep(min(1.0, seconds / 4))
    states = {look.state for look in looks}
    if states <= set(_DEAD):
        return "its process is gone"
    if states <= set(_STOPPED):
        return "its process is stopped"
    if states <= set(_UNINTERRUPTIBLE) and looks[0].ticks == looks[-1].ticks:
        return "its process waits for a device or a disk that does not answer"
    return ""


def _look(pid: int) -> _Look:
    text = Path(f"/proc/{pid}/stat").read_text()
    state, *numbers = text.rpartition(")")[2].split()  # before it is the name, which may have spaces
    user, system = numbers[10:12]
    return _Look(state, int(user) + int(system))
