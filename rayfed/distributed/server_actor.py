"""The server's process of a trial, which is one of Ray Tune's trainables.

Like `host_pool`, this module does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import ray
from ray import tune

from rayfed.core.paths import enter, working_folder
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.user_modules import SentFiles, install
from rayfed.experiments.capacity import Bundle, reserved

if TYPE_CHECKING:
    from rayfed.experiments.sweep import Job


class SentJob(TypedDict):
    """A trial for Tune: its name, what it reserves, and its `Job`, pickled."""

    trial: str
    bundles: list[Bundle]
    job: bytes


def sent(job: "Job") -> SentJob:
    """Return what Tune is given to run a trial."""
    bundles = reserved(job["config"])
    return SentJob(trial=job["trial"], bundles=bundles, job=ray.cloudpickle.dumps(job))


class ServerActor(tune.Trainable):
    """Runs the trial of its configuration, a round per step; a step lasts until a round was scored.

    The process stays for the next trial of a sweep, and so do its hosts if that trial reserves the same.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, SentJob]) -> tune.PlacementGroupFactory:
        """Return what the trial reserves: its server and its hosts."""
        return tune.PlacementGroupFactory(config["job"]["bundles"], strategy="PACK")

    def setup(
        self, config: dict[str, SentJob], actor: Any = None, files: SentFiles | None = None, work: Sequence[Any] = ()
    ) -> None:
        """Keep the trial for the first step.

        Args:
            config: The first trial as "job".
            actor, files: The recorder; the user's folders and modules.
            work: A reference to the other arguments of `Trials`, in a sequence, in which Ray leaves it alone.
        """
        install(files)
        self._files = files
        self._sent = config["job"]
        self._name = self._sent["trial"]
        self._pool: tuple[Any, HostPool] | None = None
        self._hosts()
        from rayfed.distributed.trial import Trials  # imports torch

        self._trials = Trials(actor, **ray.get(work[0]))

    def reset_config(self, new_config: Mapping[str, SentJob]) -> bool:
        self._trials.leave()
        enter(working_folder())  # Tune has changed the working directory to a folder of the trial
        self._sent = new_config["job"]
        return True

    def step(self) -> dict[str, Any]:
        result, failed = self._trials.step(self._sent["job"], self._hosts())
        if failed:
            self._close_pool()  # a host may still be at work
        return result

    def __repr__(self) -> str:  # for Ray's dashboard, which asks once
        return self._name

    def cleanup(self) -> None:
        self._trials.leave()
        self._close_pool()

    def _hosts(self) -> HostPool | None:
        """Return the hosts' processes, those of the previous trial if it reserved the same; None without hosts."""
        key = self._sent["bundles"], ray.util.get_current_placement_group()
        if len(key[0]) == 1:
            return None
        if self._pool is None or self._pool[0] != key:
            self._close_pool()
            self._pool = key, HostPool(*key, self._files, self._name)
        return self._pool[1]

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool[1].close()
            self._pool = None
