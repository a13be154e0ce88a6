"""Ray sessions, and the actors that run a trial outside a sweep."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayfed.core.errors import HostLost
from rayfed.core.records import Record
from rayfed.distributed.capacity import cluster_is_running, known_nodes, this_machine
from rayfed.distributed.placement import Outcome, bundles, check_fits, run_reserved
from rayfed.distributed.ray_fleet import sendable
from rayfed.distributed.user_modules import register_user_modules
from rayfed.engine.checkpoint import Saved
from rayfed.experiments.config import Placement
from rayfed.experiments.plan import Plan
from rayfed.experiments.trial import interrupted
from rayfed.results.checkpoints import Part
from rayfed.results.recorder import Progress, Recorder
from rayfed.results.storage import is_url

RESERVE_SECONDS = 60
AUTOSCALE_SECONDS = 1800

Watch = Callable[[Callable[[], list[Progress]], Callable[[float | None], bool]], None]
"""watch(progress, wait): may show `progress()` until `wait(seconds)` returns True, when the trial has ended."""


def connect(placement: Placement, *, dashboard: bool) -> str:
    """Join the running cluster, or start Ray here, and return the address of the dashboard ("" without one).

    Ray's log lines stay in its log folder.

    Raises:
        UsageError: The placement cannot fit. If Ray would be started here, this is checked before.
    """
    url = ""
    if not ray.is_initialized():
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if not cluster_is_running():
            check_fits(placement, this_machine())
            options["include_dashboard"] = dashboard
        url = ray.init(**options).dashboard_url or ""
    check_fits(placement, known_nodes() or [])
    return url


class RemoteRecorder:
    """A `Recorder` in another process. Rounds are sent without waiting; what must not be lost is waited for."""

    def __init__(self, actor: Any):
        self.actor = actor

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, keep_through_round: int | None) -> None:
        ray.get(self.actor.begin.remote(trial, values, rounds, keep_through_round))

    def record(self, trial: str, record: Record) -> None:
        self.actor.record.remote(trial, record)

    def begin_checkpoint(self, trial: str, base: int | None) -> int:
        number: int = ray.get(self.actor.begin_checkpoint.remote(trial, base))
        return number

    def append_to_checkpoint(self, trial: str, block: bytes) -> None:
        ray.get(self.actor.append_to_checkpoint.remote(trial, block))

    def commit_checkpoint(
        self, trial: str, header: Mapping[str, Any], server: Part, clients: Mapping[str, Part], size: int
    ) -> None:
        ray.get(self.actor.commit_checkpoint.remote(trial, header, server, clients, size))

    def discard_checkpoint(self, trial: str) -> None:
        ray.get(self.actor.discard_checkpoint.remote(trial))

    def saved(self, trial: str) -> Saved:
        checkpoints: Saved = ray.get(self.actor.saved.remote(trial))
        return checkpoints

    def saved_bytes(self, trial: str, segment: int, offset: int, length: int) -> bytes:
        content: bytes = ray.get(self.actor.saved_bytes.remote(trial, segment, offset, length))
        return content

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        ray.get(self.actor.end.remote(trial, values))

    def progress(self) -> list[Progress]:
        trials: list[Progress] = ray.get(self.actor.progress.remote())
        return trials


def remote_recorder(folder: str, experiment: str) -> RemoteRecorder:
    """Return a recorder as an actor on this node, which writes to this machine's folder."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(Recorder).options(num_cpus=0, scheduling_strategy=this_node)
    return RemoteRecorder(actor_class.remote(folder if is_url(folder) else str(Path(folder).resolve()), experiment))


class _ServerActor:
    """The server of one trial outside a sweep."""

    def run(self, plan: Plan, actor: Any, group: PlacementGroup, saved: Saved) -> Outcome:
        return run_reserved(plan, RemoteRecorder(actor), group, saved)


def run_on_ray(plan: Plan, saved: Saved, watch: Watch) -> Outcome:
    """Run a plan with its hosts and its server as Ray actors, in a session that `connect` has opened.

    Args:
        plan: The trial.
        saved: The checkpoints to continue from, as the recorder returns them; empty: start anew.
        watch: Called once while the trial runs.

    Raises:
        HostLost: The cluster did not free the resources in time, or an actor died.
    """
    place = plan.config.placement
    register_user_modules()
    recorder = remote_recorder(plan.config.results, plan.config.experiment)
    needed = [bundle for bundle in bundles(place) if bundle]
    group = placement_group(needed, strategy="PACK")
    seconds = AUTOSCALE_SECONDS if place.autoscale else RESERVE_SECONDS
    try:
        if not ray.wait([group.ready()], timeout=seconds)[0]:
            raise HostLost(f"the cluster did not free {needed} within {seconds} s; see `ray status` for what is in use")
        options: dict[str, Any] = {"num_cpus": place.server_cpus, "num_gpus": place.server_gpus}
        if bundles(place)[0]:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor_class: Any = ray.remote(_ServerActor)
        server = actor_class.options(**options).remote()
        plan = dataclasses.replace(plan, population=sendable(plan.population))
        call = server.run.remote(plan, recorder.actor, group, saved)
        watch(recorder.progress, lambda wait: bool(ray.wait([call], timeout=wait)[0]))
        try:
            outcome: Outcome = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        return outcome
    except KeyboardInterrupt:
        if (progress := next(iter(recorder.progress()), None)) is None:
            raise  # nothing was started
        ray.kill(server)
        recorder.end(plan.trial, {"status": "interrupted"})
        raise interrupted(plan, progress.round) from None
    finally:
        remove_placement_group(group)
