"""Asks the nodes of servers that record no round for long whether they still work, as hosts are asked (`HostCalls`)."""

import time
from typing import Any

import ray

from rayfed.distributed import liveness
from rayfed.records.progress import Progress

_ANSWER_SECONDS = 2.0  # until the node of a server that was lost says that it has ended it


class LateServers:
    """Watches the servers of trials by the progress of these.

    Args:
        patience: The seconds without a change of the progress after which a server may be late.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._known: dict[str, Progress] = {}
        self._heard: dict[str, float] = {}  # when the progress of a trial has changed last, or was found to go on
        self._looks: dict[str, Any] = {}  # calls that ask nodes about trials
        self._ended: dict[str, str] = {}  # why processes of trials were ended

    def hear(self, progress: Progress) -> None:
        """Note the present progress of a trial."""
        if self._known.get(progress.trial) is not progress:
            self._known[progress.trial] = progress
            self._heard[progress.trial] = time.monotonic()

    def known(self, trial: str) -> Progress | None:
        """Return the last progress of a trial; None before the first."""
        return self._known.get(trial)

    def check(self, trial: str) -> None:
        """Ask the node of a trial that runs if its server is late, and end the server's process if it does not work."""
        shown = self._known[trial]
        if trial in self._looks:
            self._take_answer(trial)
        elif self._is_late(shown) and shown.process is not None:
            self._looks[trial] = liveness.end_if_stuck(shown.process)

    def why_ended(self, trial: str) -> str:
        """Return why the process of a trial that was lost had been ended, once; "" if it had not been."""
        call = self._looks.pop(trial, None)
        if call is None:
            return self._ended.pop(trial, "")
        if ray.wait([call], timeout=_ANSWER_SECONDS)[0]:  # the loss may be known before the node has answered
            return liveness.reason(call)
        return ""

    def _is_late(self, shown: Progress) -> bool:
        rounds = shown.round - shown.first_round
        usual = 0.0
        if rounds > 0:
            usual = shown.seconds / rounds
        limit = max(self._patience, liveness.TIMES_PREDICTED * usual)
        return time.monotonic() > self._heard[shown.trial] + limit

    def _take_answer(self, trial: str) -> None:
        call = self._looks[trial]
        if not ray.wait([call], timeout=0)[0]:
            return
        del self._looks[trial]
        self._heard[trial] = time.monotonic()
        found = liveness.reason(call)
        if found:
            self._ended[trial] = found
