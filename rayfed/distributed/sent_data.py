"""Data that the command loads once for all trials."""

from collections import Counter
from collections.abc import Sequence

from rayfed.distributed.cluster import is_private
from rayfed.distributed.fleet import sendable
from rayfed.distributed.shared import Shared, share
from rayfed.engine.device_data import room_for
from rayfed.experiments.config import Config
from rayfed.experiments.plan import data_key, load_data


def sent_data(configs: Sequence[Config], *, searched: bool) -> dict[str, Shared]:
    """Return the data of the trials by `data_key`, so that all trials use one copy.

    All data together take at most a quarter of the memory. Data beyond that, and data of files that are too large to
    send, are left out; trials load them, in a cluster from files that each machine must have. So do single trials on
    this machine alone, at the same time.

    Args:
        configs: The configurations of all trials, or the corners of a space.
        searched: Whether they are the corners, of which a search makes many trials.
    """
    trials = Counter(map(data_key, configs))
    room = room_for(None, "cpu")
    sent: dict[str, Shared] = {}
    for key, config in {data_key(config): config for config in configs}.items():
        if is_private() and trials[key] == 1 and not searched:
            continue
        population = sendable(load_data(config), room)
        in_memory = [part for part in population.examples() if not part.is_on_disk]
        size = sum(part.nbytes for part in in_memory)
        if size > room or (len(in_memory) < len(population.examples()) and not is_private()):
            continue
        room -= size
        sent[key] = share(population)
    return sent
