"""A trial on Ray with its server in this process, for a loop over its rounds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from rayfed.distributed.cluster import connect
from rayfed.distributed.host_pool import HostPool, reserved_group
from rayfed.distributed.sent_data import sent_plan
from rayfed.distributed.server_trials import simulation_on
from rayfed.distributed.user_modules import register_user_modules
from rayfed.experiments.capacity import reserved
from rayfed.experiments.plan import Plan
from rayfed.experiments.simulation import Simulation
from rayfed.records.checkpoint_store import Saved
from rayfed.records.recorder import Recorder


@contextmanager
def hosts(plan: Plan, recorder: Recorder) -> Iterator[Callable[[Saved], Simulation]]:
    """Reserve what `plan` needs, and give a function that starts its hosts anew and returns its simulation.

    The function takes the checkpoints to continue from.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
    """
    connect(plan.config.placement, dashboard=False)
    register_user_modules()
    plan, files = sent_plan(plan)
    bundles = reserved(plan.config)
    pools: list[HostPool] = []
    with reserved_group(bundles) as group:
        ray.get(group.ready())

        def begin(saved: Saved) -> Simulation:
            for lost in pools:
                lost.close()
            pools[:] = [HostPool(bundles, group, files, plan.trial)]
            return simulation_on(plan, recorder, pools[0], saved)

        try:
            yield begin
        finally:
            for pool in pools:
                pool.close()
