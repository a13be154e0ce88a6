"""Where a trial runs: in this process (`placement.hosts=0`) or on Ray actors. No other module distinguishes the two.

Ray is imported only for hosts above 0.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rayfed.core.errors import RayNotStarted, UsageError
from rayfed.core.memory import memory_bytes
from rayfed.core.records import Record
from rayfed.core.status_line import StatusLine
from rayfed.distributed.capacity import Bundle, fits, known_nodes
from rayfed.engine.checkpoint import Saved
from rayfed.engine.device import device_for
from rayfed.engine.fleet import Fleet, LocalFleet
from rayfed.experiments.config import Placement
from rayfed.experiments.plan import Plan
from rayfed.experiments.progress import Countdown, note, one_trial, watch_trials
from rayfed.experiments.sweep import SweepPlan
from rayfed.experiments.trial import Sink, TrialRun, run_trial
from rayfed.results.recorder import Progress, Recorder

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from rayfed.distributed.host_pool import HostPool
    from rayfed.distributed.user_modules import SentModule

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
        memory = plan.config.state.memory
        state_memory = memory_bytes() / 4 if memory is None else memory * 2**30
        return LocalFleet(
            plan.blueprint, plan.population, resources.device, gpus=resources.gpus, state_memory=state_memory
        )
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


def launch(plan: Plan, saved: Saved, *, quiet: bool) -> Outcome:
    """Run `plan`, from the checkpoints `saved` if there are any, and show its progress unless `quiet`.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: A Ray actor died, or the cluster ended.
        Diverged: A value became infinite or NaN.
    """
    place = plan.config.placement
    if not place.hosts:
        return _run_in_process(plan, saved, quiet)
    from rayfed.distributed import cluster
    from rayfed.distributed.session_watch import watching_session

    cluster.connect(place, dashboard=False, start_seconds=plan.config.faults.start_seconds)

    countdown = Countdown()

    def watch(progress: Callable[[], list[Progress]], wait: Callable[[float | None], bool]) -> None:
        if quiet:
            wait(None)
        else:
            watch_trials(progress, wait, lambda trials: one_trial(trials[0], countdown))

    continues = "the same command with resume=true continues after the last checkpoint"
    if not plan.config.checkpoint.every:
        continues = "the same command starts again, since nothing was saved; checkpoint.every=1 saves every round"
    with watching_session(continues) as session_is_gone:

        def say(line: str) -> None:
            if not quiet and not session_is_gone():
                note(line)

        return cluster.run_on_ray(plan, saved, watch, say)


def launch_sweep(plan: SweepPlan, *, quiet: bool) -> int:
    """Run the jobs of `plan` and return the number of trials that failed or diverged.

    They run with Ray Tune; but one after the other in this process if they have no hosts and max_concurrent is 1, or if
    they have no hosts and Ray does not start. Early stopping needs Ray.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Ray did not start and is needed, or its processes died too often.
        KeyboardInterrupt: The sweep was interrupted. Its trials have ended; the message says how to continue.
    """
    from rayfed.distributed.local_sweep import run_one_by_one

    can_do_without = plan.space.search.scheduler == "none" and not any(c.placement.hosts for c in plan.configs)
    if can_do_without and plan.space.search.max_concurrent == 1:
        return run_one_by_one(plan, quiet=quiet)
    try:
        try:
            from rayfed.distributed.tune_driver import run_trials  # imports Ray
        except ImportError as error:
            raise RayNotStarted(f"Ray cannot be imported ({error}); install it with pip install 'ray[tune]'") from error
        return run_trials(plan, quiet=quiet)
    except RayNotStarted as error:
        if not can_do_without:
            raise
        note(f"{error}; the trials run one after the other in this process, without Ray")
        return run_one_by_one(plan, quiet=quiet)


def _run_in_process(plan: Plan, saved: Saved, quiet: bool) -> Outcome:
    gpus = plan.config.placement.gpus
    recorder = Recorder(plan.config.results, plan.config.experiment)
    countdown = Countdown()
    with StatusLine() as status:

        def report(record: Record) -> None:
            if not quiet:
                status.show(one_trial(recorder.progress()[0], countdown))

        try:
            return run_here(plan, recorder, Resources(device_for(gpus), gpus), saved, report)
        finally:
            for line in recorder.close():
                note(line)


def make_pool(
    placement: Placement, group: "PlacementGroup | None", *, keep: bool, sources: "Sequence[SentModule]" = ()
) -> "HostPool | None":
    """Return the processes of the hosts, in the bundles of `group`; None without hosts. See `HostPool`."""
    if not placement.hosts:
        return None
    from rayfed.distributed.host_pool import HostPool

    first = 1 if bundles(placement)[0] else 0  # an empty server bundle is not part of the group
    return HostPool(
        cpus=placement.cpus, gpus=placement.gpus, group=group, first_bundle=first, keep=keep, sources=sources
    )


def run_reserved(plan: Plan, sink: Sink, pool: "HostPool | None", saved: Saved) -> Outcome:
    """Run `plan` in a server actor, which holds the first of its `bundles`."""
    return run_here(plan, sink, reserved(plan, pool), saved, lambda record: None)


def steps_reserved(plan: Plan, sink: Sink, pool: "HostPool | None", saved: Saved = ()) -> TrialRun:
    """Return `plan` as a trial to step through, in a trial of Ray Tune, which holds the first of its `bundles`."""
    resources = reserved(plan, pool)
    return TrialRun(plan, sink, lambda: make_fleet(plan, resources), resources.device, saved=saved)


def reserved(plan: Plan, pool: "HostPool | None") -> Resources:
    """Return the resources of a process that holds the first of a plan's `bundles`."""
    gpus = bundles(plan.config.placement)[0].get("GPU", 0.0)
    return Resources(device_for(gpus), gpus, pool)


def run_here(plan: Plan, sink: Sink, resources: Resources, saved: Saved, report: Callable[[Record], None]) -> Outcome:
    """Run `plan` with its server in this process and its hosts where `make_fleet` puts them; see `run_trial`."""
    return run_trial(plan, sink, lambda: make_fleet(plan, resources), resources.device, saved=saved, report=report)


def bundles(placement: Placement) -> list[Bundle]:
    """Return what a trial reserves: the server's bundle, possibly empty, then one per host.

    Without hosts, one process needs one bundle.
    """
    if not placement.hosts:
        return [_bundle(placement.cpus, max(placement.gpus, placement.server_gpus))]
    server = _bundle(placement.server_cpus, placement.server_gpus)
    return [server, *(_bundle(placement.cpus, placement.gpus) for _ in range(placement.least_hosts))]


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def check_run(placement: Placement) -> None:
    """Raise UsageError if a single run lacks resources here. A running cluster is asked when it is joined."""
    if not placement.hosts:
        device_for(placement.gpus)
    else:
        _check_placed([placement])


def check_sweep(placements: Iterable[Placement]) -> None:
    """Raise UsageError if some trial cannot be placed here. A running cluster is asked when it is joined."""
    placements = list(placements)
    if any(placement.grows for placement in placements):
        raise UsageError("placement.hosts=auto: is for single runs; in a sweep, give each trial a number of hosts")
    _check_placed(placements)


def _check_placed(placements: Iterable[Placement]) -> None:
    if (nodes := known_nodes()) is not None:
        for placement in placements:
            check_fits(placement, nodes)


def check_fits(placement: Placement, nodes: Sequence[Bundle]) -> None:
    """Raise UsageError, with numbers, if a trial cannot be placed on `nodes` even if they are idle.

    With placement.autoscale, more nodes may come, so nothing is refused.
    """
    if not placement.autoscale and not fits(bundles(placement), nodes):
        raise UsageError(_shortage(placement, bundles(placement), nodes))


def _shortage(placement: Placement, needed: Sequence[Bundle], nodes: Sequence[Bundle]) -> str:
    def amounts(bundle: Bundle) -> str:
        return f"{bundle.get('CPU', 0):g} CPU and {bundle.get('GPU', 0):g} GPU"

    available = "; ".join(amounts(node) for node in nodes)
    but = f"but there {'is 1 node' if len(nodes) == 1 else f'are {len(nodes)} nodes'} with {available}"
    if not placement.hosts:
        key = "gpus" if needed[0].get("GPU") else "cpus"
        return f"placement.{key}={getattr(placement, key):g}: the process needs {amounts(needed[0])}, {but}"
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in ("CPU", "GPU")}
    server = f" and a server of {amounts(needed[0])}" if needed[0] else ""
    return (
        f"placement.hosts={placement.hosts}: {placement.least_hosts} hosts of {amounts(needed[-1])}{server} need "
        f"{amounts(total)} in all, {but}; use fewer hosts or smaller placement.cpus and placement.gpus, or "
        f"placement.autoscale=true if nodes can still start"
    )
