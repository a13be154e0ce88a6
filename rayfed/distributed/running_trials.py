"""Watches the trials that Ray Tune runs: how often each may start again, and whether its server still works."""

import time
from collections.abc import Iterable
from typing import Any

import ray

from rayfed.distributed import liveness
from rayfed.distributed.server_actor import JOB
from rayfed.experiments.config import Faults
from rayfed.records.progress import Progress

_EVERY_SECONDS = 0.2  # the progress in between is not known when a process is lost
_RUNNING = "RUNNING"  # Tune's status


class RunningTrials:
    """Watches trials by their progress.

    Tune starts a trial again while the number of its failures is at most `max_failures`. So that is set anew whenever
    the trial has made progress. A server that records no round for long is late, as a host is (see
    `HostCalls`): its node is asked about it.

    Args:
        faults: The options of the trials.
    """

    def __init__(self, faults: Faults):
        self._restarts = faults.restarts
        self._patience = 60 * faults.patience
        self._checked = time.monotonic()
        self._known: dict[str, Progress] = {}
        self._heard: dict[str, float] = {}  # when the progress of a trial has changed last, or was found to go on
        self._looks: dict[str, Any] = {}  # calls that ask nodes about trials
        self._ended: dict[str, str] = {}  # why processes of trials were ended

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next `check`."""
        return time.monotonic() > self._checked + _EVERY_SECONDS

    def check(self, trials: Iterable[Any], progress: Iterable[Progress]) -> None:
        """Look at Tune's trials after their progress."""
        now = self._checked = time.monotonic()
        for changed in progress:
            if self._known.get(changed.trial) is not changed:
                self._known[changed.trial] = changed
                self._heard[changed.trial] = now
        for trial in trials:
            shown = self._known.get(trial_name(trial))
            if trial.status != _RUNNING or shown is None:
                continue
            trial.max_failures = trial.num_failures + self._restarts - shown.restarts
            if shown.trial in self._looks:
                self._take_answer(shown.trial)
            elif self._is_late(shown, now) and shown.process is not None:
                self._looks[shown.trial] = liveness.end_if_stuck(shown.process)

    def why_ended(self, trial: str) -> str:
        """Return why the process of a trial was ended, once; "" if it was not."""
        return self._ended.pop(trial, "")

    def _is_late(self, shown: Progress, now: float) -> bool:
        rounds = shown.round - shown.first_round
        usual = 0.0
        if rounds > 0:
            usual = shown.seconds / rounds
        limit = max(self._patience, liveness.TIMES_PREDICTED * usual)
        return now > self._heard[shown.trial] + limit

    def _take_answer(self, trial: str) -> None:
        call = self._looks[trial]
        if not ray.wait([call], timeout=0)[0]:
            return
        del self._looks[trial]
        self._heard[trial] = time.monotonic()
        found = liveness.reason(call)
        if found:
            self._ended[trial] = found


def trial_name(trial: Any) -> str:
    """Return the name of one of Tune's trials. Its configuration may have become that of another trial since."""
    return str(trial.custom_trial_name or trial.config[JOB])
