"""What the command sends to the processes of trials: data that it loads once for all of them, and plans."""

from collections.abc import Sequence
from dataclasses import replace

from rayfed.distributed.cluster import is_private
from rayfed.distributed.ray_fleet import sendable
from rayfed.distributed.shared import Shared, share
from rayfed.distributed.user_modules import SentFiles, to_send
from rayfed.engine.device_data import room_for
from rayfed.experiments.config import Config
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_data import data_key, load_data


def sent_plan(plan: Plan) -> tuple[Plan, SentFiles]:
    """Return a plan for other processes, and the user's folders and modules, which they install first."""
    return replace(plan, population=sendable(plan.population), sources=()), to_send(plan.sources)


def sent_data(configs: Sequence[Config], *, searched: bool) -> dict[str, Shared]:
    """Return the data of the trials by `data_key`, so that all trials use one copy.

    All data together take at most a quarter of the memory. Data beyond that, and data of files that are too large to
    send, are left out; trials load them, in a cluster from files that each machine must have. So do single trials on
    this machine alone, at the same time.

    Args:
        configs: The configurations of all trials, or the corners of a space.
        searched: Whether they are the corners, of which a search makes many trials.
    """
    by_key: dict[str, list[Config]] = {}
    for config in configs:
        by_key.setdefault(data_key(config), []).append(config)
    room = room_for(None, "cpu")
    sent: dict[str, Shared] = {}
    for key, trials in by_key.items():
        if is_private() and len(trials) == 1 and not searched:
            continue
        population = sendable(load_data(trials[-1]), room)
        size = 0
        is_in_memory = True
        for part in population.examples():
            if part.is_on_disk:
                is_in_memory = False
            else:
                size += part.nbytes
        if size > room or not (is_in_memory or is_private()):
            continue
        room -= size
        sent[key] = share(population)
    return sent
