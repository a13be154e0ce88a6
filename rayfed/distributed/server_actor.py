"""The server's process of a single run. Like `host_pool`, this module does not import torch."""

import time
from typing import Any

from rayfed.core.machine import importing
from rayfed.distributed.host_pool import HostPool, hide_unreserved_gpus
from rayfed.distributed.shared import Shared
from rayfed.distributed.start import Start
from rayfed.distributed.user_modules import SentFiles, install

_SECONDS_PER_CALL = 0.5  # in which the command waits; between two calls it can end the run


class ServerActor:
    """Runs the rounds of a trial.

    Args:
        start: How the trial starts.
        hosts: Its hosts.
        recorder: The recorder.
        files: The user's folders and modules.
        plan: Its `Plan`, as `share` sends it.
    """

    def __init__(self, start: Start, hosts: HostPool, recorder: Any, files: SentFiles, plan: Shared):
        install(files)
        hide_unreserved_gpus()
        with importing():
            from rayfed.distributed.server_trials import ENDED, Trials  # imports torch

        self._start = start
        self._hosts = hosts
        self._trials = Trials(recorder, plan=plan)
        self._ended = ENDED

    def __repr__(self) -> str:  # for Ray's dashboard
        return self._start.trial

    def rounds(self) -> dict[str, Any]:
        """Run rounds for a moment, at least one, and return what `Trials.step` returns of the last."""
        until = time.monotonic() + _SECONDS_PER_CALL
        while True:
            result, _ = self._trials.step(self._start, self._hosts)
            if result[self._ended] or time.monotonic() > until:
                return result

    def leave(self) -> None:
        """Wait until the recorder has all rounds."""
        self._trials.leave()
