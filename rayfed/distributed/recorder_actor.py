"""The recorder as a Ray actor on the node of the command, so that results arrive there without shared storage.

If the actor dies, the command ends with one line. `resume=true` then goes on from the last checkpoints.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.core.errors import HostLost
from rayfed.core.machine import Process
from rayfed.core.paths import enter, working_folder
from rayfed.core.round_record import Record
from rayfed.distributed.gauges import Gauges
from rayfed.distributed.ray_internals import cause_of_death
from rayfed.records.progress import Progress
from rayfed.records.recorder import Recorder
from rayfed.records.round_report import RoundReport
from rayfed.records.trials import merge_trials

MOST_ROUNDS_AHEAD = 16
"""The rounds of a trial that may be on their way to the recorder while the trial goes on."""
MOST_BYTES_AHEAD = 2**20
"""The bytes that they may take, unless a single round takes more."""
_CLOSE_SECONDS = 150.0


class RecorderProcess(Recorder):
    """A recorder in a process of Ray.

    Args:
        folder, experiment, in_sweep: As for `Recorder`.
        here: The folder in which the command was given.
    """

    def __init__(self, folder: str, experiment: str, *, in_sweep: bool, here: Path):
        enter(here)
        super().__init__(folder, experiment, in_sweep=in_sweep)
        self._trackers.add(Gauges())

    def merge(self) -> None:
        """Write the rows of all trials to the file that pandas reads."""
        merge_trials(self.folder, self.experiment)

    def __repr__(self) -> str:  # for Ray's dashboard
        return self.experiment


def start_recorder(folder: str, experiment: str, *, in_sweep: bool) -> Any:
    """Start a recorder on this node and return its actor; the arguments are those of `Recorder`."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(RecorderProcess)
    options = {"num_cpus": 0, "scheduling_strategy": this_node}
    return actor_class.options(**options).remote(folder, experiment, in_sweep=in_sweep, here=working_folder())


class RemoteRecorder(Recorder if TYPE_CHECKING else object):  # type: ignore[misc]
    """The `Recorder` of another process, with all of its methods.

    A round is sent without waiting, unless many are on their way. Every other method waits until all rounds have
    arrived, and then for its result.

    Raises:
        HostLost: From every method: the recorder died.
    """

    def __init__(self, actor: Any):
        self.actor = actor
        self._ahead: deque[tuple[Any, int]] = deque()  # calls of `add` whose results are not known, and their bytes
        self._bytes_ahead = 0
        self._progress: dict[str, Progress] = {}
        self._changes = 0
        self._lock = threading.Lock()  # a thread shows the progress that another one asks for

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.settle()
            return _results(getattr(self.actor, name).remote(*arguments, **options))

        return call

    def record(self, trial: str, record: Record) -> RoundReport:
        report = RoundReport.of(record)
        self.add(trial, report)
        return report

    def add(self, trial: str, report: RoundReport) -> None:
        self._ahead.append((self.actor.add.remote(trial, report), report.nbytes))
        self._bytes_ahead += report.nbytes
        while self._is_full():
            self._await_first()
        calls = [call for call, _ in self._ahead]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for _ in done:  # calls of one process end in their order
            self._await_first()

    def _is_full(self) -> bool:
        """Return whether the next round waits until the first one on its way has arrived."""
        if len(self._ahead) > MOST_ROUNDS_AHEAD:
            return True
        return len(self._ahead) > 1 and self._bytes_ahead > MOST_BYTES_AHEAD

    def settle(self) -> None:
        """Wait until the recorder has all rounds."""
        while self._ahead:
            self._await_first()

    def doing(self, trial: str, what: str) -> None:
        self.actor.doing.remote(trial, what)

    def runs_in(self, trial: str, process: Process) -> None:
        self.actor.runs_in.remote(trial, process)

    def progress(self) -> list[Progress]:
        with self._lock:
            self._changes, changed = _results(self.actor.changed_progress.remote(self._changes))
            for progress in changed:
                self._progress[progress.trial] = progress
            return list(self._progress.values())

    def close(self) -> list[str]:
        """End the recorder's process when all trials have ended, and return a line on each failure of a tracker."""
        lines: list[str] = []
        with contextlib.suppress(ray.exceptions.RayError):
            lines = ray.get(self.actor.close.remote(), timeout=_CLOSE_SECONDS)
        ray.kill(self.actor)
        return lines

    def _await_first(self) -> None:
        """Wait until the recorder has the first of the rounds on their way."""
        call, nbytes = self._ahead.popleft()
        self._bytes_ahead -= nbytes
        _results(call)


def close_recorder(recorder: Recorder, say: Callable[[str], None]) -> list[Progress]:
    """Record which trials were interrupted, close the recorder, and return the progress of all trials.

    Args:
        say: What is called with a line on each failure of a tracker.
    """
    progress: list[Progress] = []
    with contextlib.suppress(HostLost):  # the death of the recorder was raised before
        progress = recorder.progress()
        for trial in progress:
            if trial.status == "running" and trial.rounds:  # else it never began, and has no row
                recorder.end(trial.trial, {"status": "interrupted"})
        progress = recorder.progress()
    for line in recorder.close():
        say(line)
    return progress


def _results(calls: Any) -> Any:
    """Return what calls returned, or raise what the recorder raised."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise HostLost(
            f"the recorder died ({cause_of_death(error)}); what it had written is kept, and the same command with "
            "resume=true continues"
        ) from error
