"""The server's process of a trial of a sweep, which is one of Ray Tune's trainables.

Like `host_pool`, this module does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from rayfed.core.machine import importing
from rayfed.core.paths import enter, working_folder
from rayfed.distributed.host_pool import HostPool, hide_unreserved_gpus
from rayfed.distributed.start import Start
from rayfed.distributed.user_modules import SentFiles, install
from rayfed.experiments.capacity import Bundle, reserved

if TYPE_CHECKING:
    from rayfed.experiments.sweep import Job

JOB = "job"
"""The entry of Tune's configurations that is no hyperparameter."""


PROCESS_NAME = "ServerActor"
"""How Ray names the process of a server: as the one of a single run."""


class SentJob(str):
    """What a trial needs beside the hyperparameters that Tune sees, as a string with the name of the trial.

    Tune and its loggers take it for a string. Other objects would be replaced by Tune, or written out in every line.

    Attributes:
        bundles: What the trial reserves.
        values: The hyperparameters as they were sent. A scheduler may change those that Tune sees.
        job: The `Job`, pickled.
    """

    bundles: list[Bundle]
    values: Mapping[str, Any]
    job: bytes

    @classmethod
    def of(cls, job: "Job", values: Mapping[str, Any]) -> "SentJob":
        made = cls(job["trial"])
        made.bundles = reserved(job["config"])
        made.values = dict(values)
        made.job = ray.cloudpickle.dumps(job)
        return made


def sent(job: "Job", values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with which Tune runs a trial: `values`, which Tune sees, and the rest."""
    return {**values, JOB: SentJob.of(job, values)}


class TuneServer(tune.Trainable):
    """Runs the trial of its configuration, a round per step.

    The process stays for the next trial of a sweep, and so do its hosts if that trial reserves the same.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return what the trial reserves: its server and its hosts."""
        return tune.PlacementGroupFactory(config[JOB].bundles, strategy="PACK")

    def setup(
        self, config: dict[str, Any], actor: Any = None, files: SentFiles | None = None, work: Sequence[Any] = ()
    ) -> None:
        """Keep the trial for the first step.

        Args:
            config: The hyperparameters of the first trial, and its `SentJob`.
            actor, files: The recorder; the user's folders and modules.
            work: A reference to the other arguments of `Trials`, in a sequence, in which Ray leaves it alone.
        """
        install(files)
        self._files = files
        self._start: Start
        self._take(config)
        self._pool: tuple[Any, HostPool] | None = None
        self._hosts()
        hide_unreserved_gpus()
        with importing():
            from rayfed.distributed.server_trials import Trials  # imports torch

        self._trials = Trials(actor, **ray.get(work[0]))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trials.leave()
        enter(working_folder())  # Tune has changed the working directory to a folder of the trial
        self._take(new_config)
        return True

    def step(self) -> dict[str, Any]:
        result, failed = self._trials.step(self._start, self._hosts())
        if failed:
            self._close_pool()  # a host may still be at work
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Return which checkpoint of the recorder has the present state. The state itself stays there."""
        return self._trials.save(self._start)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Let the next step go on from a checkpoint, which may be of another trial."""
        self._trials.leave()
        self._start = self._start._replace(checkpoint=checkpoint)

    def __repr__(self) -> str:  # for Ray's dashboard, which asks once
        return self._start.trial

    def cleanup(self) -> None:
        self._trials.leave()
        self._close_pool()

    def _take(self, config: Mapping[str, Any]) -> None:
        """Note the trial of a configuration. After an exchange, it has the `SentJob` of another trial."""
        values = dict(config)
        job: SentJob = values.pop(JOB)
        changes = {key: value for key, value in values.items() if value != job.values.get(key)}
        self._bundles = job.bundles
        self._start = Start(self.trial_name or str(job), job.job, changes, values)

    def _hosts(self) -> HostPool | None:
        """Return the hosts' processes, those of the previous trial if it reserved the same; None without hosts."""
        key = self._bundles, ray.util.get_current_placement_group()
        if len(key[0]) == 1:
            return None
        if self._pool is None or self._pool[0] != key:
            self._close_pool()
            self._pool = key, HostPool(*key, self._files, self._start.trial)
        return self._pool[1]

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool[1].close()
            self._pool = None
