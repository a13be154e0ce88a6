"""The recorder as a Ray actor on the node of the command, so that results arrive there without shared storage.

If the actor dies, the command ends with one line. `resume=true` then goes on from the last checkpoints.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.core.errors import HostLost
from rayfed.core.paths import enter, working_folder
from rayfed.core.records import Event, Record
from rayfed.distributed.ray_internals import cause_of_death
from rayfed.records.checkpoints import Saved, SavedPart
from rayfed.records.files import Holding
from rayfed.records.recorder import Progress, Recorder
from rayfed.records.storage import is_url
from rayfed.records.tracking import CLOSE_SECONDS

_TRACKERS_VARIABLES = ("WANDB_", "MLFLOW_")
_GAUGES = {
    "round": "The last round of the trial that was recorded",
    "score": "The last value of the metric that selects rounds: on validation examples; without any, on test examples",
    "busy": "The share of the last round during which its hosts trained clients, the mean over hosts",
}


class Gauges:
    """What Ray's metrics show of each trial, as `ray_rayfed_round`, `ray_rayfed_score` and `ray_rayfed_busy`."""

    def __init__(self) -> None:
        tags = {"score": ("trial", "metric", "split")}
        self._gauges = {
            name: Gauge(f"rayfed_{name}", text, tags.get(name, ("trial",))) for name, text in _GAUGES.items()
        }

    def show(self, progress: Progress, record: Record) -> None:
        """Show a round of a trial."""
        trial = {"trial": progress.trial}
        self._gauges["round"].set(record.round, trial)
        if (share := record.busy_share) is not None:
            self._gauges["busy"].set(share, trial)
        split, score = ("test", progress.test) if progress.val is None else ("val", progress.val)
        if score is not None:
            self._gauges["score"].set(score, trial | {"metric": progress.selection.metric, "split": split})


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

    def record(self, trial: str, record: Record) -> None:
        super().record(trial, record)
        if (progress := self._trials[trial].progress) is not None:
            self._gauges.show(progress, record)


def start_recorder(folder: str, experiment: str, *, in_sweep: bool) -> Any:
    """Start a recorder on this node and return its actor; the arguments are those of `Recorder`."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(RecorderProcess)
    return actor_class.options(num_cpus=0, scheduling_strategy=this_node).remote(
        folder if is_url(folder) else str(Path(folder).resolve()),
        experiment,
        in_sweep=in_sweep,
        here=working_folder(),
        variables={name: value for name, value in os.environ.items() if name.startswith(_TRACKERS_VARIABLES)},
    )


class RemoteRecorder:
    """A `Recorder` in another process, as a trial or the command sees it. Rounds are sent without waiting.

    Raises:
        HostLost: From every method: the recorder died.
    """

    def __init__(self, actor: Any):
        self.actor = actor
        self._sent: list[Any] = []  # calls of `record` whose result is not known

    def begin(
        self,
        trial: str,
        values: Mapping[str, Any],
        rounds: int,
        keep_through_round: int | None,
        holdings: Sequence[Holding] = (),
    ) -> None:
        self._call("begin", trial, values, rounds, keep_through_round, holdings)

    def record(self, trial: str, record: Record) -> None:
        self._sent.append(self.actor.record.remote(trial, record))
        done, self._sent = ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
        _results(done)

    def settle(self) -> None:
        """Wait until the recorder has all records."""
        sent, self._sent = self._sent, []
        _results(sent)

    def event(self, trial: str, event: Event) -> None:
        self._call("event", trial, event)

    def doing(self, trial: str, what: str) -> None:
        self.actor.doing.remote(trial, what)

    def begin_checkpoint(self, trial: str) -> int:
        number: int = self._call("begin_checkpoint", trial)
        return number

    def write_states(self, trial: str, number: int, states: Mapping[str, bytes]) -> None:
        self._call("write_states", trial, number, states)

    def commit_checkpoint(
        self, trial: str, number: int, base: int | None, header: Mapping[str, Any], parts: Mapping[str, SavedPart]
    ) -> None:
        self._call("commit_checkpoint", trial, number, base, header, parts)

    def delete_checkpoints(self, trial: str) -> None:
        self._call("delete_checkpoints", trial)

    def saved(self, trial: str) -> Saved:
        checkpoints: Saved = self._call("saved", trial)
        return checkpoints

    def saved_states(self, trial: str, parts: Mapping[str, SavedPart]) -> Mapping[str, bytes]:
        contents: Mapping[str, bytes] = self._call("saved_states", trial, parts)
        return contents

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        self._call("end", trial, values)

    def has_begun(self, trial: str) -> bool:
        begun: bool = self._call("has_begun", trial)
        return begun

    def lost(self, trial: str, cause: str) -> int:
        times: int = self._call("lost", trial, cause)
        return times

    def progress(self) -> list[Progress]:
        progress: list[Progress] = self._call("progress")
        return progress

    def close(self) -> list[str]:
        """End the recorder's process when all trials have ended, and return a line on each tracker that failed."""
        lines: list[str] = []
        with contextlib.suppress(ray.exceptions.RayError):
            lines = ray.get(self.actor.close.remote(), timeout=2 * CLOSE_SECONDS)
        ray.kill(self.actor)
        return lines

    def _call(self, method: str, *arguments: Any) -> Any:
        self.settle()
        return _results(getattr(self.actor, method).remote(*arguments))


def _results(calls: Any) -> Any:
    """Return what calls returned; an exception that the recorder raised is raised as it is."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise HostLost(
            f"the recorder died ({cause_of_death(error)}); what it had written is kept, and the same command with "
            "resume=true continues"
        ) from error
