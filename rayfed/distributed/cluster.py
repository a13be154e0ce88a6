"""Ray as the commands use it: joining or starting it, and the actors that a trial is made of."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayfed.core.errors import HostLost
from rayfed.core.records import Record
from rayfed.distributed.capacity import bundles, check_fits, cluster_is_running, this_machine
from rayfed.distributed.ray_fleet import RayFleet, sendable
from rayfed.engine.device import device_for
from rayfed.engine.fleet import Fleet, LocalFleet
from rayfed.experiments.config import Placement
from rayfed.experiments.plan import Plan
from rayfed.experiments.trial import interrupted, run_trial
from rayfed.results.recorder import Progress, Recorder

RESERVE_SECONDS = 60
AUTOSCALE_SECONDS = 1800


def connect(placement: Placement, *, dashboard: bool) -> str:
    """Joins the running cluster, or starts Ray here; returns the dashboard's address ("" without one).

    Ray's own log lines stay in its log folder.

    Raises:
        UsageError: the placement cannot fit; before Ray is started where none is running.
    """
    url = ""
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if not cluster_is_running():
            check_fits(placement, this_machine())
            quiet["include_dashboard"] = dashboard
        url = ray.init(**quiet).dashboard_url or ""
    check_fits(placement, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    return url


def carry_user_modules(*things: Any) -> list[ModuleType]:
    """Sends the user's own modules (files below the working directory) along by value: other nodes lack the files.

    Returns the modules that define the classes or objects `things`, for a worker that looks them up by name.
    """
    here, carried = Path.cwd().resolve(), {}
    for thing in things:
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__.split(".")[0] in ("rayfed", "__main__"):
            continue
        if Path(file).resolve().is_relative_to(here) and "site-packages" not in file:
            ray.cloudpickle.register_pickle_by_value(module)
            carried[module.__name__] = module
    return list(carried.values())


class RemoteRecorder:
    """A `Recorder` in another process: rounds are sent without waiting, what must not be lost is waited for."""

    def __init__(self, actor: Any):
        self.actor = actor

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, keep_through_round: int | None) -> None:
        ray.get(self.actor.begin.remote(trial, values, rounds, keep_through_round))

    def record(self, trial: str, record: Record) -> None:
        self.actor.record.remote(trial, record)

    def checkpoint(self, trial: str, content: bytes) -> None:
        ray.get(self.actor.checkpoint.remote(trial, content))

    def saved(self, trial: str) -> bytes | None:
        return ray.get(self.actor.saved.remote(trial))

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        ray.get(self.actor.end.remote(trial, values))

    def progress(self) -> list[Progress]:
        return ray.get(self.actor.progress.remote())


def remote_recorder(folder: str, experiment: str) -> RemoteRecorder:
    """A recorder as an actor on this very node, writing to this machine's folder."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made = ray.remote(Recorder).options(num_cpus=0, scheduling_strategy=here)
    return RemoteRecorder(made.remote(str(Path(folder).resolve()), experiment))


def run_placed(
    plan: Plan,
    sink: RemoteRecorder,
    group: PlacementGroup | None,
    saved: bytes | None,
    report: Callable[[Record], None] = lambda record: None,
) -> tuple[str, dict[str, Any]]:
    """Runs a trial in the process that is its server (a server actor, or a Tune trial) with hosts in `group`."""
    place = plan.config.placement
    gpus = place.server_gpus if place.hosts else max(place.gpus, place.server_gpus)
    device = device_for(gpus)

    def fleet() -> Fleet:
        if not place.hosts:
            return LocalFleet(plan.blueprint, plan.population, device, gpus=gpus)
        assert group is not None, "hosts live in the bundles of a placement group"
        first = 1 if bundles(place)[0] else 0  # an empty server bundle does not exist
        return RayFleet(plan.blueprint, plan.population, place, device=device, group=group, first_bundle=first)

    return run_trial(plan, sink, fleet, device, saved=saved, report=report)


class _ServerActor:
    """The server of one simulation outside a sweep."""

    def run(self, plan: Plan, actor: Any, group: PlacementGroup, saved: bytes | None) -> tuple[str, dict[str, Any]]:
        return run_placed(plan, RemoteRecorder(actor), group, saved)


def run_on_ray(
    plan: Plan, saved: bytes | None, watch: Callable[[Callable[[], list[Progress]], Callable[[float], bool]], None]
) -> tuple[str, dict[str, Any]]:
    """Runs one plan with its hosts and its server as Ray actors; returns what `run_trial` returns.

    `watch(progress, wait)` is called once: it may show `progress()` until `wait(seconds)` says that the trial is over.
    """
    place = plan.config.placement
    carry_user_modules(plan.config.algorithm, plan.blueprint.model, plan.blueprint.loss)
    recorder = remote_recorder(plan.config.results, plan.config.experiment)
    wanted = [bundle for bundle in bundles(place) if bundle]
    group = placement_group(wanted, strategy="PACK")
    seconds = AUTOSCALE_SECONDS if place.autoscale else RESERVE_SECONDS
    try:
        if not ray.wait([group.ready()], timeout=seconds)[0]:
            raise HostLost(f"the cluster did not free {wanted} within {seconds} s; `ray status` tells who holds it")
        options: dict[str, Any] = {"num_cpus": place.server_cpus, "num_gpus": place.server_gpus}
        if bundles(place)[0]:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        made: Any = ray.remote(_ServerActor)
        server = made.options(**options).remote()
        plan = dataclasses.replace(plan, population=sendable(plan.population))
        call = server.run.remote(plan, recorder.actor, group, saved)
        watch(recorder.progress, lambda wait: bool(ray.wait([call], timeout=wait)[0]))
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
    except KeyboardInterrupt:
        if (progress := next(iter(recorder.progress()), None)) is None:
            raise  # nothing was started
        ray.kill(server)
        recorder.end(plan.trial, {"status": "interrupted"})
        raise interrupted(plan, progress.round) from None
    finally:
        remove_placement_group(group)
