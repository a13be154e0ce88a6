"""Watches the trials that Ray Tune runs: how often each may start again, and whether its server still works."""

import time
from collections.abc import Iterable
from typing import Any

from rayfed.distributed.late_servers import LateServers
from rayfed.distributed.tune_server import JOB
from rayfed.experiments.config import Faults
from rayfed.records.progress import Progress

_EVERY_SECONDS = 0.2  # the progress in between is not known when a process is lost
_RUNNING = "RUNNING"  # Tune's status


class RunningTrials:
    """Watches trials by their progress.

    Tune starts a trial again while the number of its failures is at most `max_failures`. So that is set anew whenever
    the trial has made progress.

    Args:
        faults: The options of the trials.
    """

    def __init__(self, faults: Faults):
        self._restarts = faults.restarts
        self._servers = LateServers(60 * faults.patience)
        self._checked = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next `check`."""
        return time.monotonic() > self._checked + _EVERY_SECONDS

    def check(self, trials: Iterable[Any], progress: Iterable[Progress]) -> None:
        """Look at Tune's trials after their progress."""
        self._checked = time.monotonic()
        for changed in progress:
            self._servers.hear(changed)
        for trial in trials:
            shown = self._servers.known(trial_name(trial))
            if trial.status != _RUNNING or shown is None:
                continue
            trial.max_failures = trial.num_failures + self._restarts - shown.restarts
            self._servers.check(shown.trial)

    def why_ended(self, trial: str) -> str:
        """Return why the process of a trial was ended, once; "" if it was not."""
        return self._servers.why_ended(trial)


def trial_name(trial: Any) -> str:
    """Return the name of one of Tune's trials. Its configuration may have become that of another trial since."""
    return str(trial.custom_trial_name or trial.config[JOB])
