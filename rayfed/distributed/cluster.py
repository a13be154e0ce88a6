"""Ray sessions, and the actors that run a trial outside a sweep."""

import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.core.errors import HostLost, RayNotStarted, UsageError
from rayfed.core.records import Event
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.hosts import sendable
from rayfed.distributed.private_session import start_here
from rayfed.distributed.processes import cause_of_death, log_folder, lost_its_node
from rayfed.distributed.ray_internals import keep_raylet_messages_in_the_log, patient_start
from rayfed.distributed.recording import DriversRecorder, RemoteRecorder, Watchdog
from rayfed.distributed.server_process import Outcome, make_pool, run_reserved
from rayfed.distributed.session_watch import ended_by_sigterm
from rayfed.distributed.start_clock import AUTOSCALE_SECONDS, StartClock
from rayfed.distributed.user_modules import SentFiles, install, register_user_modules, to_send
from rayfed.engine.checkpoint import newest_round
from rayfed.engine.device import breaks_device
from rayfed.experiments.capacity import (
    Bundle,
    check_fits,
    cluster_address,
    cluster_is_running,
    known_nodes,
    ray_folder,
    reserved,
    servers_gpus,
    spread,
    this_machine,
)
from rayfed.experiments.config import Config, Faults, Placement
from rayfed.experiments.plan import Plan
from rayfed.experiments.trial import interrupted
from rayfed.records.checkpoints import Saved
from rayfed.records.recorder import Progress, Recorder
from rayfed.records.trials import mark_interrupted

CONNECT_SECONDS = 10
RESERVE_SECONDS = 60
_SPREAD_SECONDS = 5.0  # until GPUs that should be idle count as used by others
_LOOK_SECONDS = 1.0  # between looks at whether a server is alive

Watch = Callable[[Callable[[], list[Progress]], Callable[[float | None], bool]], None]
"""watch(progress, wait): may show `progress()` until `wait(seconds)` returns True, when the trial has ended."""


def connect(placement: Placement, *, dashboard: bool, start_seconds: float = Faults.start_seconds) -> str:
    """Join the running cluster, or start Ray here, and return the address of the dashboard ("" without one).

    A Ray that is started here listens on the loopback interface only. Ray's log lines stay in its log folder.

    Raises:
        UsageError: The placement cannot fit. If Ray would be started here, this is checked before.
        HostLost: The running cluster does not answer, or cannot be joined.
        RayNotStarted: Ray did not start within `start_seconds`.
    """
    url = ""
    if not ray.is_initialized():
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        start: Any = ray.init
        joins = cluster_is_running()
        if joins:
            _check_reachable(min(start_seconds, CONNECT_SECONDS))
        else:
            check_fits(placement, this_machine())
            options["include_dashboard"] = dashboard
            start = start_here
        with _started_in_time(start_seconds, joins=(cluster_address() or "auto") if joins else None):
            url = start(**options).dashboard_url or ""
        keep_raylet_messages_in_the_log()
    check_fits(placement, known_nodes() or [])
    return url


def _check_reachable(seconds: float) -> None:
    """Raise HostLost if nothing answers at the address of the cluster, for which Ray itself would wait for minutes."""
    address = cluster_address()
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return  # such as "local", which Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        raise HostLost(
            f"the Ray cluster at {address} does not answer ({error.strerror or error}); start it, or {_alone()}"
        ) from error


def _alone() -> str:
    return f"{'unset RAY_ADDRESS' if os.environ.get('RAY_ADDRESS') else 'run ray stop'} to use this machine alone"


@contextmanager
def _started_in_time(seconds: float, *, joins: str | None = None) -> Iterator[None]:
    """Give Ray's own processes `seconds` to start.

    Args:
        seconds: How long to wait.
        joins: The address of a running cluster, if it is to be joined.

    Raises:
        HostLost: The cluster cannot be joined.
        RayNotStarted: They did not start in time, or one of them ended.
    """
    try:
        with patient_start(seconds):
            yield
    except (UsageError, HostLost):
        raise
    except Exception as error:  # Ray raises bare exceptions here
        words = " ".join(str(error).split())
        if joins is not None:
            raise HostLost(
                f"the Ray cluster at {joins} cannot be joined within faults.start_seconds={seconds:g} ({words[:200]}); "
                f"check the address, or {_alone()}"
            ) from error
        if "AF_UNIX" in words:
            raise RayNotStarted(
                f"Ray did not start, because the paths of its sockets in {ray_folder()} are too long; set "
                f"RAY_TMPDIR to a shorter folder, such as /tmp"
            ) from error
        raise RayNotStarted(
            f"Ray did not start ({words[:200]}); its logs are in {log_folder()}. On a slow machine, give more than "
            f"faults.start_seconds={seconds:g}"
        ) from error


class _ServerActor:
    """The server of one trial outside a sweep."""

    def __init__(self, files: SentFiles, trial: str) -> None:
        install(files)
        self._trial = trial

    def __repr__(self) -> str:  # for Ray's dashboard
        return self._trial

    def run(self, plan: Plan, actor: Any, pool: HostPool | None, saved: Saved) -> Outcome:
        sink = RemoteRecorder(actor)
        try:
            with sink.signs_of_life(plan.trial):
                return run_reserved(plan, sink, pool, saved)
        except OSError as error:
            if lost_its_node(error):
                os._exit(1)  # the trial goes on elsewhere, and has not failed
            raise


class _ServerProcess:
    """The process of a trial's server, which is started again from the last checkpoint when it dies or hangs."""

    def __init__(self, plan: Plan, recorder: DriversRecorder, group: PlacementGroup, say: Callable[[str], None]):
        self._plan = dataclasses.replace(plan, population=sendable(plan.population), sources=())
        self._recorder, self._group, self._say = recorder, group, say
        self._files = to_send(plan.sources)
        self._pool = make_pool(plan.config, group, keep=True, files=self._files)
        if self._pool is not None:
            self._pool.name = plan.trial
            for position in range(plan.config.placement.least_hosts):
                self._pool.actor(position)  # starts while the server does
        self._restarts, self._watchdog = plan.config.faults.restarts, Watchdog(recorder)
        self._actor: Any = None
        self._call: Any = None
        self.outcome: Outcome | None = None

    def start(self, saved: Saved, *, again: bool = False) -> None:
        """Start the process, which continues from the checkpoints `saved`.

        Args:
            saved: The checkpoints.
            again: Whether another process was lost. Its node may have been lost with it, and Ray moves a bundle only
                to a node that has room. A server without a GPU then shares whichever bundle of the trial is left.
        """
        place = self._plan.config.placement
        gpus = servers_gpus(self._plan.config)
        shares = again and not gpus
        # without resources of its own, it shares the first host's bundle, and thus its node
        there = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=-1 if shares else 0)
        cpus = 0.0 if shares else place.server_cpus
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": there}
        actor_class: Any = ray.remote(_ServerActor)
        self._actor = actor_class.options(**options).remote(self._files, self._plan.trial)
        self._call = self._actor.run.remote(self._plan, self._recorder.actor, self._pool, saved)
        self._clock = StartClock(self._plan.config.faults.start_seconds, self._group if place.autoscale else None)
        self._saved = saved

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end of the trial, and return whether it has come.

        Raises:
            HostLost: The server died more often than it is started again.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while self.outcome is None:
            left = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - time.monotonic())
            if left <= 0:
                return False
            if ray.wait([self._call], timeout=left)[0]:
                self._ended()
            else:
                self._look()
        return True

    def kill(self) -> None:
        ray.kill(self._actor)

    def _ended(self) -> None:
        try:
            self.outcome = ray.get(self._call)
        except ray.exceptions.RayTaskError as error:
            if not breaks_device(error.cause):
                raise error.cause from error
            self.kill()
            self._start_again(cause_of_death(error))
        except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
            self._start_again(cause_of_death(error))

    def _look(self) -> None:
        """Kill the server if it has given no sign of life for too long."""
        faults = self._plan.config.faults
        self._watchdog.look(lambda trial: faults.patience)
        if not self._watchdog.processes and self._clock.is_late():
            raise HostLost(
                f"the server did not start within {faults.start_seconds:g} s; `ray status` shows what is in use, and "
                f"Ray's logs are in {log_folder()}. On a slow machine, give more faults.start_seconds"
            )

    def _start_again(self, cause: str) -> None:
        plan, trial = self._plan, self._plan.trial
        happened, cause = self._watchdog.lost(trial, cause)
        self._restarts -= 1
        self._recorder.lost(trial, Event(event=f"server {happened}", detail=cause))
        if self._restarts < 0:
            error = f"the server died ({cause}), and faults.restarts={plan.config.faults.restarts} allows no other"
            self._recorder.end(trial, {**plan.values(), "status": "failed", "error": error})
            raise HostLost(error)
        begun = any(progress.rounds for progress in self._recorder.progress())
        self._say(f"the server died ({cause}); it is started again from the last checkpoint")
        self.start(self._recorder.saved(trial) if begun else self._saved, again=True)


def run_on_ray(plan: Plan, saved: Saved, watch: Watch, say: Callable[[str], None]) -> Outcome:
    """Run a plan with its hosts and its server as Ray actors, in a session that `connect` has opened.

    Args:
        plan: The trial.
        saved: The checkpoints to continue from, as the recorder returns them; empty: start anew.
        watch: Called once while the trial runs.
        say: Called with a line when a process died and is started again.

    Raises:
        HostLost: The cluster did not free the resources in time, or processes died too often.
    """
    faults = plan.config.faults
    register_user_modules()
    recorder = DriversRecorder(
        plan.config.results, plan.config.experiment, restarts=faults.restarts, patience=faults.patience, say=say
    )
    group = server = None
    try:
        group = _reserved(plan.config)
        server = _ServerProcess(plan, recorder, group, say)
        server.start(saved)
        with ended_by_sigterm(lambda: _terminated(plan, recorder.last_progress)):
            watch(recorder.progress, server.wait)
        assert server.outcome is not None
        return server.outcome
    except KeyboardInterrupt:
        progress = next((progress for progress in recorder.progress() if progress.rounds), None)
        if progress is None or server is None:
            raise  # nothing was started
        server.kill()
        recorder.end(plan.trial, {"status": "interrupted"})
        raise interrupted(progress.round, newest_round(recorder.saved(plan.trial))) from None
    finally:
        if group is not None:
            remove_placement_group(group)
        recorder.close()


def _reserved(config: Config) -> PlacementGroup:
    """Return the resources of a trial, on as many GPUs as it can use unless others use them.

    Raises:
        HostLost: The cluster did not free them in time.
    """
    packed, spread_out = reserved(config), spread(config, known_nodes() or [])
    if spread_out != packed and (group := _group(spread_out, _SPREAD_SECONDS)) is not None:
        return group
    seconds = AUTOSCALE_SECONDS if config.placement.autoscale else RESERVE_SECONDS
    if (group := _group(packed, seconds)) is None:
        needed = [bundle for bundle in packed if bundle]
        raise HostLost(f"the cluster did not free {needed} within {seconds:g} s; see `ray status` for what is in use")
    return group


def _group(bundles: Sequence[Bundle], seconds: float) -> PlacementGroup | None:
    """Return a placement group of the bundles that are not empty, None if it is not ready in time."""
    group: PlacementGroup = placement_group([bundle for bundle in bundles if bundle], strategy="PACK")
    try:
        ready = bool(ray.wait([group.ready()], timeout=seconds)[0])
    except BaseException:
        remove_placement_group(group)
        raise
    if not ready:
        remove_placement_group(group)
        return None
    return group


def _terminated(plan: Plan, progress: Sequence[Progress]) -> str:
    """Record that SIGTERM ended the trial of `plan`, and return the line that says so."""
    mark_interrupted(plan.config.results, plan.config.experiment, [plan.trial])
    saved = newest_round(Recorder(plan.config.results, plan.config.experiment).saved(plan.trial))
    return str(interrupted(max((one.round for one in progress), default=0), saved))
