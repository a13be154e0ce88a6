"""The recorder as an actor, which may die or hang and be started again while trials go on.

A trial keeps each record until the recorder says that it is on disk. A recorder that was started again knows nothing,
and says so; the trial then begins again from the last round on disk and sends the later ones once more, so that no row
is lost and none is doubled.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.core.errors import HostLost
from rayfed.core.records import Event, Record
from rayfed.core.working_folder import enter, working_folder
from rayfed.distributed.gauges import Gauges
from rayfed.distributed.processes import Process, cause_of_death, kill_process, this_process
from rayfed.records.checkpoints import Part, Saved
from rayfed.records.holdings import Holding
from rayfed.records.recorder import NotBegun, Progress, Recorder, Sign
from rayfed.records.storage import is_url
from rayfed.records.tracking.feed import CLOSE_SECONDS

_GONE = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError)
_RETRY_SECONDS = 0.2
_LOOK_SECONDS = 1.0  # between looks at signs of life
_TRACKERS_VARIABLES = ("WANDB_", "MLFLOW_")
SIGN_SECONDS = 2.0
"""Seconds between two signs of life of a process that runs a trial."""


class RemoteRecorder:
    """A `Recorder` in another process, as a trial sees it. Rounds are sent without waiting.

    Raises:
        HostLost: From every method: the recorder died more often than it is started again.
    """

    def __init__(self, actor: Any):
        self.actor = actor
        self._begun: tuple[str, Mapping[str, Any], int] | None = None
        self._on_disk: int | None = None
        self._unsaved: list[Record] = []
        self._sent: list[Any] = []  # calls of `record` whose result is not known

    def begin(
        self,
        trial: str,
        values: Mapping[str, Any],
        rounds: int,
        keep_through_round: int | None,
        holdings: Sequence[Holding] = (),
    ) -> None:
        self._begun, self._unsaved, self._sent = None, [], []
        self._call("begin", trial, values, rounds, keep_through_round, holdings)
        self._begun, self._on_disk = (trial, values, rounds), keep_through_round

    def record(self, trial: str, record: Record) -> None:
        self._unsaved.append(record)
        self._sent.append(self.actor.record.remote(trial, record))
        self._look(wait=False)

    def settle(self) -> None:
        """Wait until the recorder has all records, though they need not be on disk."""
        while self._sent:
            self._look(wait=True)

    def event(self, trial: str, event: Event) -> None:
        self._call("event", trial, event)

    def doing(self, trial: str, what: str) -> None:
        self.actor.doing.remote(trial, what)

    def begin_checkpoint(self, trial: str) -> int:
        self.settle()
        number: int = self._call("begin_checkpoint", trial)
        if self._unsaved:  # a checkpoint begins when all records are on disk
            self._on_disk, self._unsaved = self._unsaved[-1].round, []
        return number

    def write_states(self, trial: str, number: int, states: Mapping[str, bytes]) -> None:
        self._call("write_states", trial, number, states)

    def commit_checkpoint(
        self, trial: str, number: int, base: int | None, header: Mapping[str, Any], parts: Mapping[str, Part]
    ) -> None:
        self._call("commit_checkpoint", trial, number, base, header, parts)

    def saved(self, trial: str) -> Saved:
        checkpoints: Saved = self._call("saved", trial)
        return checkpoints

    def saved_states(self, trial: str, parts: Mapping[str, Part]) -> Mapping[str, bytes]:
        contents: Mapping[str, bytes] = self._call("saved_states", trial, parts)
        return contents

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        self.settle()
        self._call("end", trial, values, begun=self._begun is not None and self._begun[0] == trial)
        self._begun, self._unsaved = None, []

    def attempts(self, trial: str) -> tuple[int, bool]:
        attempts: tuple[int, bool] = self._call("attempts", trial)
        return attempts

    @contextlib.contextmanager
    def signs_of_life(self, trial: str) -> Iterator[None]:
        """Tell the recorder every few seconds that this process, which runs `trial`, is alive and not stopped."""
        process, ended = this_process(), threading.Event()

        def tell() -> None:
            while not ended.is_set():
                self.actor.alive.remote(trial, process)
                ended.wait(SIGN_SECONDS)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _look(self, *, wait: bool) -> None:
        """Take in the results of calls of `record`; with `wait`, of all of them."""
        try:
            if not wait:
                done, self._sent = ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
            else:
                done, self._sent = self._sent, []
            for on_disk in _results(done):
                self._on_disk = on_disk
        except (NotBegun, *_GONE):
            self._begin_again()
            return
        if self._on_disk is not None:
            self._unsaved = [record for record in self._unsaved if record.round > (self._on_disk or 0)]

    def _begin_again(self) -> None:
        """Tell a recorder that was started again what the one before it did not write."""
        if self._begun is None:
            return
        trial, values, rounds = self._begun
        _retried(self.actor, "begin", trial, values, rounds, self._on_disk)
        self._sent = [self.actor.record.remote(trial, record) for record in self._unsaved]

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        while True:
            try:
                return _retried(self.actor, method, *arguments, **keywords)
            except NotBegun:
                self._begin_again()
                self.settle()


class RecorderProcess(Recorder):
    """A recorder in a process of Ray.

    Args:
        folder, experiment, in_sweep: As for `Recorder`.
        here: The folder in which the command was given.
        variables: Environment variables of the command that trackers read. A process of a cluster that was there
            before has those of the cluster's start.
    """

    def __init__(self, folder: str, experiment: str, *, in_sweep: bool, here: Path, variables: Mapping[str, str]):
        enter(here)
        os.environ.update(variables)
        super().__init__(folder, experiment, in_sweep=in_sweep)
        self._gauges = Gauges()

    def __repr__(self) -> str:  # for Ray's dashboard
        return self.experiment

    def record(self, trial: str, record: Record) -> int | None:
        written = super().record(trial, record)
        if (progress := self._trials[trial].progress) is not None:
            self._gauges.show(progress, record)
        return written


class DriversRecorder:
    """The recorder as the command sees it that has started it.

    It keeps what the recorder knows, for the next one, and kills a recorder that hangs.

    Args:
        folder, experiment: Where the recorder writes: on this machine, or in an object store.
        in_sweep: Whether the trials belong to a sweep.
        restarts: How often the recorder is started again.
        patience: The seconds without an answer after which it counts as hanging.
        say: Called with a line when it was started again.

    Attributes:
        last_progress: The progress of all trials when it was last asked for.
    """

    def __init__(
        self,
        folder: str,
        experiment: str,
        *,
        restarts: int,
        patience: float,
        say: Callable[[str], None],
        in_sweep: bool = False,
    ):
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": this_node, "max_restarts": restarts}
        actor_class: Any = ray.remote(RecorderProcess)
        self.actor = actor_class.options(**options).remote(
            folder if is_url(folder) else str(Path(folder).resolve()),
            experiment,
            in_sweep=in_sweep,
            here=working_folder(),
            variables={name: value for name, value in os.environ.items() if name.startswith(_TRACKERS_VARIABLES)},
        )
        self._patience, self._say = patience, say
        self._lock = threading.RLock()
        self.last_progress: list[Progress] = []
        self._pid: int | None = None

    def progress(self) -> list[Progress]:
        """Return the progress of all trials."""
        with self._lock:
            self.last_progress = self._call("progress")
            return self.last_progress

    def signs(self) -> list[Sign]:
        """Return the last sign of life of each trial that runs."""
        signs: list[Sign] = self._call("signs")
        return signs

    def saved(self, trial: str) -> Saved:
        checkpoints: Saved = self._call("saved", trial)
        return checkpoints

    def event(self, trial: str, event: Event) -> None:
        self._call("event", trial, event)

    def lost(self, trial: str, event: Event) -> int:
        times: int = self._call("lost", trial, event)
        return times

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        self._call("end", trial, values)

    def close(self) -> None:
        """End the recorder's process, when all trials have ended."""
        with contextlib.suppress(ray.exceptions.RayError):
            for line in ray.get(self.actor.close.remote(), timeout=max(self._patience, 2 * CLOSE_SECONDS)):
                self._say(line)
        ray.kill(self.actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            while True:
                try:
                    if self._pid is None:
                        self._pid = _retried(self.actor, "pid")  # it may still be starting
                    if ray.get(self.actor.pid.remote(), timeout=self._patience) != self._pid:
                        # Ray has started it again since the last call, which knows of no error
                        self._restart("recorder lost", "its process was killed or crashed")
                    return ray.get(getattr(self.actor, method).remote(*arguments), timeout=self._patience)
                except ray.exceptions.GetTimeoutError:
                    self._restart("recorder hanging", f"no answer for {self._patience:g} s")
                except _GONE as error:
                    self._restart("recorder lost", cause_of_death(error))

    def _restart(self, event: str, detail: str) -> None:
        """Wait for the next recorder, and tell it what the one before knew."""
        began, pid = time.monotonic(), self._pid
        if event == "recorder hanging" and pid is not None:
            os.kill(pid, signal.SIGKILL)  # it is on this machine
            while _retried(self.actor, "pid") == pid:
                time.sleep(_RETRY_SECONDS)
        self._pid = _retried(self.actor, "pid")
        _retried(self.actor, "adopt", self.last_progress)
        seconds = time.monotonic() - began
        self._say(f"the recorder was lost ({detail}) and started again within {seconds:.1f} s; no row is lost")
        for progress in self.last_progress:
            if progress.status == "running":
                happened = Event(event=event, detail=detail, round=progress.round, seconds=seconds)
                _retried(self.actor, "event", progress.trial, happened)


class Watchdog:
    """Kills the processes of trials that have given no sign of life for too long.

    Attributes:
        processes: The process that runs a trial, for those that have given a sign of life.
    """

    def __init__(self, recorder: DriversRecorder):
        self._recorder, self._looked = recorder, 0.0
        self.processes: dict[str, Process] = {}
        self._dead: set[Process] = set()
        self._hanging: dict[str, str] = {}

    def look(self, patience: Callable[[str], float]) -> None:
        """Look at the signs of life, once a second; `patience(trial)` is how long one may give none, in seconds."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for sign in self._recorder.signs():
            if sign.process in self._dead:
                continue
            self.processes[sign.trial] = sign.process
            if sign.silent > patience(sign.trial):
                self._hanging[sign.trial] = f"it gave no sign of life for {sign.silent:.0f} s"
                self._dead.add(sign.process)
                kill_process(sign.process)

    def lost(self, trial: str, cause: str) -> tuple[str, str]:
        """Note that the process of a trial is gone; return whether it was "lost" or "hanging", and the cause."""
        if (process := self.processes.pop(trial, None)) is not None:
            self._dead.add(process)
        hanging = self._hanging.pop(trial, "")
        return ("hanging", hanging) if hanging else ("lost", cause)


def _retried(actor: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
    """Call a method of the recorder, again while it is being started again."""
    while True:
        try:
            return _results(getattr(actor, method).remote(*arguments, **keywords))
        except ray.exceptions.ActorUnavailableError:
            time.sleep(_RETRY_SECONDS)
        except ray.exceptions.ActorDiedError as error:
            cause = cause_of_death(error)
            raise HostLost(f"the recorder died ({cause}), and faults.restarts allows no other") from error


def _results(calls: Any) -> Any:
    """Return what calls returned; an exception that the recorder raised is raised as it is."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
