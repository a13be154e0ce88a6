"""The process in which a trial's server runs, a Ray actor or a trial of Ray Tune: what it was given, and the hosts that
it makes of that. Ray is imported only where the plan has hosts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rayfed.engine.checkpoint import Saved
from rayfed.engine.device import device_for
from rayfed.engine.fleet import Fleet
from rayfed.experiments.capacity import bundles
from rayfed.experiments.config import Placement
from rayfed.experiments.in_process import local_fleet
from rayfed.experiments.plan import Plan
from rayfed.experiments.trial import Sink, TrialRun, run_trial

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from rayfed.distributed.host_pool import HostPool
    from rayfed.distributed.user_modules import SentFiles

Outcome = str
"""What `run_trial` returns: the hash of the final state."""


@dataclass(frozen=True)
class Resources:
    """What the process of a trial's server was given.

    Attributes:
        device: The device of the server, and of the clients if they train in this process.
        gpus: GPUs that the process has reserved; below 1 it keeps to that share of the GPU's memory.
        pool: The processes of the hosts; None without hosts.
    """

    device: torch.device
    gpus: float = 0.0
    pool: "HostPool | None" = None


def make_fleet(plan: Plan, resources: Resources) -> Fleet:
    """Return the hosts of `plan`: one in this process, or those of `resources.pool`."""
    place = plan.config.placement
    if not place.hosts:
        return local_fleet(plan, resources.device, resources.gpus)
    from rayfed.distributed.ray_fleet import RayFleet

    assert resources.pool is not None, "hosts run in the processes of a pool"
    return RayFleet(
        plan.blueprint,
        plan.population,
        place,
        device=resources.device,
        pool=resources.pool,
        hosts=place.least_hosts,
        grow=place.grows,
        restarts=plan.config.faults.restarts,
        patience=plan.config.faults.patience,
        start_seconds=plan.config.faults.start_seconds,
    )


def make_pool(
    placement: Placement, group: "PlacementGroup | None", *, keep: bool, files: "SentFiles | None" = None
) -> "HostPool | None":
    """Return the processes of the hosts, in the bundles of `group`; None without hosts. See `HostPool`."""
    if not placement.hosts:
        return None
    from rayfed.distributed.host_pool import HostPool

    first = 1 if bundles(placement)[0] else 0  # an empty server bundle is not part of the group
    return HostPool(cpus=placement.cpus, gpus=placement.gpus, group=group, first_bundle=first, keep=keep, files=files)


def run_reserved(plan: Plan, sink: Sink, pool: "HostPool | None", saved: Saved) -> Outcome:
    """Run `plan` in a server actor, which holds the first of its `bundles`."""
    resources = reserved(plan, pool)
    return run_trial(plan, sink, lambda: make_fleet(plan, resources), resources.device, saved=saved)


def steps_reserved(plan: Plan, sink: Sink, pool: "HostPool | None", saved: Saved = ()) -> TrialRun:
    """Return `plan` as a trial to step through, in a trial of Ray Tune, which holds the first of its `bundles`."""
    resources = reserved(plan, pool)
    return TrialRun(plan, sink, lambda: make_fleet(plan, resources), resources.device, saved=saved)


def reserved(plan: Plan, pool: "HostPool | None") -> Resources:
    """Return the resources of a process that holds the first of a plan's `bundles`."""
    gpus = bundles(plan.config.placement)[0].get("GPU", 0.0)
    return Resources(device_for(gpus), gpus, pool)
