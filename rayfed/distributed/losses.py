"""What to say of a trial that has lost a process, or waits for a place."""

from collections.abc import Sequence
from typing import Any

import ray

from rayfed.distributed.ray_internals import cause_of_death
from rayfed.experiments.config import Config
from rayfed.records.progress import RENEWING_ROUNDS

WAITING_SECONDS = 30.0
"""Without a process that runs, until a line says what the cluster has not freed."""


def cause_of_loss(error: BaseException | None, where: str, why_ended: str) -> str:
    """Return why a trial was lost: its server died, or what the server raised, such as the loss of a host.

    Args:
        error: What Ray raised for the call of the server; None if nobody knows.
        where: The node of the server, as " on 10.0.0.2"; may be empty.
        why_ended: Why the server was ended here; "" if it was not.
    """
    server = f"its server{where}"
    if why_ended:
        return f"{server}: {why_ended}"
    if isinstance(error, ray.exceptions.RayTaskError):
        return cause_of_death(error)
    if isinstance(error, ray.exceptions.RayActorError):
        return f"{server}: {cause_of_death(error)}"
    lines = str(error).strip().splitlines() or ["unknown cause"]
    return lines[-1]


def too_often(times: int, cause: str, allowed: int) -> str:
    """Return the error of a trial that may not start again."""
    lost = "lost"
    if times > 1:
        lost = f"lost {times} times without {RENEWING_ROUNDS} rounds or a checkpoint in between"
    return f"{lost} ({cause}); faults.restarts={allowed} allows no other start"


def failure_by_losses(config: Config, message: str, error: BaseException | None) -> dict[str, Any]:
    """Return the row in the table `trials` of a trial that may not start again.

    Args:
        config: Its configuration.
        message: Its error; see `too_often`.
        error: What Ray raised last. What a task raised has the traceback of its process.
    """
    values = config.tree() | {"status": "failed", "error": message}
    if isinstance(error, ray.exceptions.RayTaskError):
        values["traceback"] = str(error)
    return values


def waiting_line(needs: Sequence[Any]) -> str:
    """Return what to say of trials that wait for the cluster, from the bundles that one needs."""
    return f"no trial has begun for {WAITING_SECONDS:g} s: it needs {needs}; `ray status` shows what is free"
