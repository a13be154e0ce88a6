"""The recorder as a Ray actor on the node of the command, so that results arrive there without shared storage.

If the actor dies, the command ends with one line. `resume=true` then goes on from the last checkpoints.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.core.errors import HostLost
from rayfed.core.paths import enter, working_folder
from rayfed.core.records import Record
from rayfed.distributed.ray_internals import cause_of_death
from rayfed.records.recorder import Recorder

_CLOSE_SECONDS = 60.0


class RecorderProcess(Recorder):
    """A recorder in a process of Ray.

    Args:
        folder, experiment, in_sweep: As for `Recorder`.
        here: The folder in which the command was given.
    """

    def __init__(self, folder: str, experiment: str, *, in_sweep: bool, here: Path):
        enter(here)
        super().__init__(folder, experiment, in_sweep=in_sweep)

    def __repr__(self) -> str:  # for Ray's dashboard
        return self.experiment


def start_recorder(folder: str, experiment: str, *, in_sweep: bool) -> Any:
    """Start a recorder on this node and return its actor; the arguments are those of `Recorder`."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(RecorderProcess)
    options = {"num_cpus": 0, "scheduling_strategy": this_node}
    return actor_class.options(**options).remote(folder, experiment, in_sweep=in_sweep, here=working_folder())


class RemoteRecorder(Recorder if TYPE_CHECKING else object):  # type: ignore[misc]
    """The `Recorder` of another process, with all of its methods. Rounds are sent without waiting.

    Every other method waits until all rounds have arrived, and then for its result.

    Raises:
        HostLost: From every method: the recorder died.
    """

    def __init__(self, actor: Any):
        self.actor = actor
        self._sent: list[Any] = []  # calls of `record` whose result is not known

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.settle()
            return _results(getattr(self.actor, name).remote(*arguments, **options))

        return call

    def record(self, trial: str, record: Record) -> None:
        self._sent.append(self.actor.record.remote(trial, record))
        done, self._sent = ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
        _results(done)

    def settle(self) -> None:
        """Wait until the recorder has all records."""
        sent, self._sent = self._sent, []
        _results(sent)

    def doing(self, trial: str, what: str) -> None:
        self.actor.doing.remote(trial, what)

    def close(self) -> list[str]:
        """End the recorder's process when all trials have ended, and return a line on each failure of TensorBoard."""
        lines: list[str] = []
        with contextlib.suppress(ray.exceptions.RayError):
            lines = ray.get(self.actor.close.remote(), timeout=_CLOSE_SECONDS)
        ray.kill(self.actor)
        return lines


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
