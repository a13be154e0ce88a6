"""The process in which a trial's server runs, a Ray actor or a trial of Ray Tune: what it was given, and the hosts that
it makes of that. Ray is imported only where the plan has hosts.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rayfed.engine.device import device_for
from rayfed.engine.fleet import Fleet
from rayfed.experiments.capacity import reserved, servers_gpus
from rayfed.experiments.config import Config
from rayfed.experiments.in_process import local_fleet
from rayfed.experiments.plan import Plan
from rayfed.experiments.trial import Sink, TrialRun, run_trial
from rayfed.records.checkpoints import Saved

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from rayfed.distributed.host_pool import HostPool
    from rayfed.distributed.user_modules import SentFiles

Outcome = str
"""What `run_trial` returns: the hash of the final state."""


def make_pool(
    config: Config, group: "PlacementGroup | None", *, keep: bool, files: "SentFiles | None" = None
) -> "HostPool | None":
    """Return the processes of the hosts, in the bundles of `group`; None without hosts. See `HostPool`."""
    placement, (server, first_host, *_) = config.placement, [*reserved(config), {}]
    if not placement.hosts:
        return None
    from rayfed.distributed.host_pool import HostPool

    return HostPool(
        cpus=placement.cpus,
        gpus=placement.gpus,
        server_gpus=placement.gpus - first_host.get("GPU", 0.0),
        group=group,
        first_bundle=1 if server else 0,  # an empty server bundle is not part of the group
        grouped=placement.least_hosts,
        keep=keep,
        files=files,
    )


def run_reserved(plan: Plan, sink: Sink, pool: "HostPool | None", saved: Saved) -> Outcome:
    """Run `plan` in a server actor, which holds the first of its `bundles`."""
    device, make_fleet = _reserved(plan, pool)
    return run_trial(plan, sink, make_fleet, device, saved=saved, replaceable=True)


def steps_reserved(plan: Plan, sink: Sink, pool: "HostPool | None", saved: Saved = ()) -> TrialRun:
    """Return `plan` as a trial to step through, in a trial of Ray Tune, which holds the first of its `bundles`."""
    device, make_fleet = _reserved(plan, pool)
    return TrialRun(plan, sink, make_fleet, device, saved=saved, replaceable=True)


def _reserved(plan: Plan, pool: "HostPool | None") -> tuple[torch.device, Callable[[], Fleet]]:
    """Return the device of a process that holds the first of a plan's `bundles`, and what makes its hosts.

    That is one in this process, or those of `pool`.
    """
    place, gpus = plan.config.placement, servers_gpus(plan.config)
    device = device_for(gpus, plan.blueprint.model)
    if pool is None:
        return device, lambda: local_fleet(plan, device, gpus)
    from rayfed.distributed.ray_fleet import RayFleet

    return device, lambda: RayFleet(
        plan.blueprint, plan.population, place, plan.config.faults, device=device, pool=pool
    )
