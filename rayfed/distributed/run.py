"""A single run on Ray: its server and its hosts in processes of their own, which start again when one of them is lost.

Ray Tune does the same for the trials of a sweep. A single run does without it, since it would start later: Tune takes
long to import, in this process and in the server's, and the hosts could only be asked for by the server.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from rayfed.core.errors import HostLost
from rayfed.distributed.cluster import address_of, connect, on_node
from rayfed.distributed.host_pool import HostPool, placed, reserved_group
from rayfed.distributed.late_servers import LateServers
from rayfed.distributed.losses import WAITING_SECONDS, cause_of_loss, failure_by_losses, too_often, waiting_line
from rayfed.distributed.ray_internals import is_preempted
from rayfed.distributed.recorder_actor import RemoteRecorder, close_recorder, start_recorder
from rayfed.distributed.sent_data import sent_plan
from rayfed.distributed.server_actor import ServerActor
from rayfed.distributed.server_trials import ENDED, RAISED
from rayfed.distributed.shared import share
from rayfed.distributed.signals import handled_signals
from rayfed.distributed.start import Start
from rayfed.distributed.user_modules import register_user_modules
from rayfed.engine.checkpoint import newest_round
from rayfed.experiments.capacity import Bundle, reserved
from rayfed.experiments.plan import Plan
from rayfed.experiments.progress import note, one_trial, restart_line, watched
from rayfed.experiments.simulation import interrupted
from rayfed.experiments.sweep import Job
from rayfed.records.progress import Progress
from rayfed.records.recorder import Recorder
from rayfed.records.trials import mark_interrupted, recorded_value

_LOOK_SECONDS = 0.2  # between two looks at the progress, and at Ctrl-C


def run_trial(plan: Plan, *, quiet: bool) -> str:
    """Run a single trial on hosts, and return the hash of its final state.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
        HostLost: Processes died too often, or the recorder died.
        KeyboardInterrupt: Ctrl-C ended the trial; the message says how to continue.
        Exception: The error that ended the trial.
    """
    config = plan.config
    connect(config.placement, dashboard=False)
    register_user_modules()
    with reserved_group(reserved(config)) as group:
        run = _Run(plan, group, quiet=quiet)
        run.to_its_end()
    return str(recorded_value(config.results, config.experiment, plan.trial, "weights_hash"))


class _Run:
    """A single run under way.

    Args:
        group: The placement group with what the trial reserves.
    """

    def __init__(self, plan: Plan, group: PlacementGroup, *, quiet: bool):
        config = plan.config
        self._config = config
        self._trial = plan.trial
        self._group = group
        self._quiet = quiet
        self._recorder = RemoteRecorder(start_recorder(config.results, config.experiment, in_sweep=False))
        light_plan, self._files = sent_plan(plan)
        self._plan = share(light_plan)
        job = Job(trial=plan.trial, config=config, identity={})
        self._start = Start(plan.trial, ray.cloudpickle.dumps(job), {}, {})
        self._servers = LateServers(60 * config.faults.patience)
        self._progress: list[Progress] = []
        self._waiting = _Waiting(group, reserved(config), self._say)
        self._is_interrupted = False

    def to_its_end(self) -> None:
        """Run the trial, again from its last checkpoint after each loss, and close the recorder."""
        try:
            with self._signals(), watched(self._look, lambda progress: one_trial(progress[0]), quiet=self._quiet):
                has_ended = False
                while not has_ended:
                    has_ended = self._attempt()
        except KeyboardInterrupt:
            self._is_interrupted = True
        finally:
            self._progress = close_recorder(self._recorder, self._say)
        is_done = any(progress.status == "done" for progress in self._progress)
        if self._is_interrupted and not is_done:
            raise self._interruption()

    def _attempt(self) -> bool:
        """Run the trial until it has ended or loses a process; return whether it has ended.

        Raises:
            HostLost: It has lost processes too often.
            KeyboardInterrupt: Ctrl-C was pressed.
            Exception: The error that ended the trial.
        """
        try:
            with self._server() as server:
                result = self._last_result(server)
        except ray.exceptions.RayError as error:
            self._note_loss(error)
            return False
        if RAISED in result:
            raise ray.cloudpickle.loads(result[RAISED])
        return True

    @contextmanager
    def _server(self) -> Iterator[Any]:
        """Start the processes of the trial, and end them after this block."""
        bundles = reserved(self._config)
        hosts = HostPool(bundles, self._group, self._files, self._trial)
        server_class: Any = ray.remote(ServerActor)
        actor_class = server_class.options(**placed(bundles, self._group, 0))
        server = actor_class.remote(self._start, hosts, self._recorder.actor, self._files, self._plan)
        try:
            yield server
        finally:
            ray.kill(server)
            hosts.close()

    def _last_result(self, server: Any) -> dict[str, Any]:
        """Return what `Trials.step` returned of the last round."""
        result: dict[str, Any] = {ENDED: False}
        while not result[ENDED]:
            result = self._awaited(server.rounds.remote())
            if self._is_interrupted and not result[ENDED]:
                ray.get(server.leave.remote())
                raise KeyboardInterrupt
        return result

    def _awaited(self, call: Any) -> dict[str, Any]:
        """Return what a call of the server returns, and look after the run until then."""
        while not ray.wait([call], timeout=_LOOK_SECONDS)[0]:
            has_begun = bool(self._look())
            if has_begun:
                self._servers.check(self._trial)
            elif self._is_interrupted:
                raise KeyboardInterrupt
            self._waiting.check()
        result: dict[str, Any] = ray.get(call)
        return result

    def _note_loss(self, error: ray.exceptions.RayError) -> None:
        """Record that a process was lost; raise HostLost if the trial may not start again."""
        cause = cause_of_loss(error, self._where(), self._servers.why_ended(self._trial))
        progress = self._recorder.lost(self._trial, cause, counts=not is_preempted(error))
        allowed = self._config.faults.restarts
        if progress.restarts <= allowed:
            self._say(restart_line(progress, cause))
            return
        message = too_often(progress.restarts, cause, allowed)
        self._recorder.end(self._trial, failure_by_losses(self._config, message, error))
        raise HostLost(message) from error

    def _where(self) -> str:
        """Return " on 10.0.0.2" for the node of the server, as far as it is known and not this machine alone."""
        for progress in self._progress:
            if progress.process is not None:
                return on_node(address_of(progress.process.node))
        return ""

    def _look(self) -> list[Progress]:
        """Return the progress of the trial; nothing before it has begun."""
        self._progress = self._recorder.progress()
        for progress in self._progress:
            self._servers.hear(progress)
        return self._progress

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """In this block, end the run after the present round at Ctrl-C, and this process at once at SIGTERM."""

        def note_ctrl_c() -> None:
            self._is_interrupted = True

        def last_line() -> str:
            mark_interrupted(self._config.results, self._config.experiment, [self._trial])
            return str(self._interruption())

        with handled_signals(note_ctrl_c, last_line):
            yield

    def _interruption(self) -> KeyboardInterrupt:
        """Return what says after which round the run was interrupted, and how it goes on."""
        saved = newest_round(Recorder(self._config.results, self._config.experiment).saved(self._trial))
        last = max((progress.round for progress in self._progress), default=0)
        return interrupted(last, saved)

    def _say(self, line: str) -> None:
        if not self._quiet:
            note(line)


class _Waiting:
    """Says once what a run waits for, if its processes have no place for long.

    Args:
        group: The placement group, which waits for `needs`.
        say: What is called with the line.
    """

    def __init__(self, group: PlacementGroup, needs: Sequence[Bundle], say: Callable[[str], None]):
        self._group = group
        self._needs = needs
        self._say = say
        self._placed = time.monotonic()  # when there was a place last
        self._is_said = False

    def check(self) -> None:
        now = time.monotonic()
        if placement_group_table(self._group)["state"] == "CREATED":
            self._placed = now
        elif not self._is_said and now - self._placed > WAITING_SECONDS:
            self._is_said = True
            self._say(waiting_line(self._needs))
