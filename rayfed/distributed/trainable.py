"""`rayfed.trainable`: simulations as trials of a `ray.tune.Tuner` of the user's own.

Unlike `rayfed.distributed.tune`, this module sets none of Tune's options for the process of the user.
"""

import atexit
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import ray
from ray import tune

from rayfed.core.errors import HostLost, StorageError
from rayfed.distributed.cluster import connect
from rayfed.distributed.recorder_actor import RemoteRecorder, start_recorder
from rayfed.distributed.sent_data import sent_data
from rayfed.distributed.shared import share
from rayfed.distributed.start import Start
from rayfed.distributed.tune_server import PROCESS_NAME, TuneServer
from rayfed.distributed.user_modules import SentFiles, register_user_modules, to_send
from rayfed.experiments.capacity import reserved
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_identity import trial_name
from rayfed.records.storage import make_experiment_folder

_MANY = 10**6


class _Base(NamedTuple):
    """What all trials share: the configuration, before Tune overrides keys, and the hashes of what was given."""

    config: Config
    identity: Mapping[str, Any]

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration with the values that Tune has chosen, by nested or dotted keys."""
        chosen = {key: value for key, value in values.items() if not key.startswith("__")}  # Tune's own
        return Config.read(self.config.tree(), chosen)


class TunersTrial(TuneServer):
    """A trial of a `Tuner` of the user's own: a round per step.

    Attributes:
        base: What all trials share.
    """

    base: ClassVar[_Base]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(reserved(cls.base.with_values(config)), strategy="PACK")

    def _take(self, config: Mapping[str, Any]) -> None:
        chosen = self.base.with_values(config)
        name = trial_name(chosen)
        job = ray.cloudpickle.dumps({"trial": name, "config": chosen, "identity": self.base.identity})
        self._bundles = reserved(chosen)
        self._start = Start(name, job, {}, config, tuner_id=self.trial_id)


def trainable_of(plan: Plan, given: Given, *, keep_state: bool) -> type[tune.Trainable]:
    """Return the class of trials whose base is `plan`, and start what records them.

    The recorder ends with this process.

    Raises:
        UsageError: The cluster that was joined lacks the resources.
    """
    config = plan.config
    os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")  # rounds without an evaluation have no score
    connect(config.placement, dashboard=True)
    register_user_modules()
    make_experiment_folder(config.results, config.experiment)
    recorder = RemoteRecorder(start_recorder(config.results, config.experiment, in_sweep=False))
    atexit.register(_close, recorder)
    names: Sequence[str] = ("clients_hash", "model_label", "loss_label", "code_hash")
    identity = {name: getattr(plan, name) for name in names if given}
    work: dict[str, Any] = {"given": share(given), "keep_state": keep_state, "at_once": _MANY}
    work |= {"where": "the scheduler", "raises": True}
    if given.clients is None:
        work["data"] = sent_data([config], searched=True)
    kind: Any = type("Rayfed", (TunersTrial,), {"base": _Base(config, identity)})
    files: SentFiles = to_send(plan.sources)
    made: Any = tune.with_parameters(kind, actor=recorder.actor, files=files, work=[ray.put(work)])
    made.__qualname__ = PROCESS_NAME
    return made  # type: ignore[no-any-return]


def _close(recorder: Any) -> None:
    """Close a recorder at the end of the process, if Ray still runs."""
    if not ray.is_initialized():
        return
    with contextlib.suppress(HostLost, StorageError, ray.exceptions.RayError):
        recorder.merge()
        recorder.close()
