"""The trials of a sweep as a list for Ray Tune, and what Tune reads in the folder of a sweep."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

from ray.tune.logger import LoggerCallback
from ray.tune.search.basic_variant import BasicVariantGenerator

from rayfed.core.errors import UsageError
from rayfed.distributed.tune_server import JOB, SentJob
from rayfed.records.storage import Storage

# by which Tune knows them
_FILE = "result.json"
_TUNERS_STATE = "tuner.pkl"
_OWN_COLUMNS = ("trial_id", "time_total_s", "time_this_iter_s", "timestamp", "date", "done")


class JobList(BasicVariantGenerator):
    """Gives Tune a list of `SentJob`, a grid of the entry `JOB`, and shows it the hyperparameters of each.

    It is no `Searcher`, with which schedulers such as population-based training do not work.
    """

    def next_trial(self) -> Any:
        trial: Any = super().next_trial()  # type: ignore[no-untyped-call]
        if trial is not None:
            job: SentJob = trial.config[JOB]
            trial.set_config({**job.values, JOB: job})
            trial.evaluated_params = dict(job.values)
            words = [f"{key}={value}" for key, value in job.values.items()]
            trial.set_experiment_tag(",".join(words))
        return trial


class RoundsFile(LoggerCallback):
    """Writes the rounds of each trial to `tune/TRIAL/result.json`, from which Tune makes its tables of results.

    Tune's own logger repeats the configuration in every line.
    """

    def __init__(self) -> None:
        self._files: dict[Any, Any] = {}  # by Tune's trial

    def log_trial_start(self, trial: Any) -> None:
        if trial in self._files:
            return
        trial.init_local_path()
        self._files[trial] = Path(trial.local_path, _FILE).open("a")  # noqa: SIM115  # until the trial ends

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.log_trial_start(trial)
        line = {name: value for name, value in result.items() if _is_number(value) or name in _OWN_COLUMNS}
        self._files[trial].write(json.dumps(line) + "\n")

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        file = self._files.pop(trial, None)
        if file is not None:
            file.close()


class _Refused:
    """Is unpickled into an exception."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _refuse, ()


def _refuse() -> None:
    raise UsageError("Tuner.restore: the folder is one of rayfed; the same command with resume=true continues it")


def refuse_restore(folder: Storage) -> None:
    """Let `Tuner.restore` say that rayfed restores its own sweeps, since Tune has no states of their trials."""
    folder.write(_TUNERS_STATE, pickle.dumps(_Refused()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and not math.isinf(value))
