"""The progress of trials, as the recorder follows it."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rayfed.core.machine import Process
from rayfed.core.round_record import Event, Selection
from rayfed.records.round_report import RoundReport

RENEWING_ROUNDS = 10
"""The rounds after which a restarted trial counts as one that works: it may restart as often as at its beginning."""


@dataclass
class Progress:
    """The progress of a trial.

    Attributes:
        round: The last round that was recorded, which may be the final stage; `rounds_done` counts training rounds.
        left: The expected seconds of the remaining rounds; None while they are unknown.
        val, test: The last values of the metric of `selection`, as means over clients.
        clock: The seconds on the simulated clock; None without one.
        lost: How often the trial lost a process and went back to its last checkpoint.
        restarts: The losses that count since the trial last made progress: `RENEWING_ROUNDS` rounds or a checkpoint.
            `faults.restarts` limits them.
        stop_reason: The reason of an early stop.
        doing: What the trial does after a round, if that may take long.
        process: The process of its server on Ray; None without Ray.
    """

    trial: str
    rounds: int
    status: str = "running"
    round: int = 0
    rounds_done: int = 0
    first_round: int = 0
    clients: int = 0
    seconds: float = 0.0
    left: float | None = None
    val: float | None = None
    test: float | None = None
    best_val: float | None = None
    error: str | None = None
    has_traceback: bool = False
    clock: float | None = None
    lost: int = 0
    restarts: int = 0
    stop_reason: str | None = None
    selection: Selection = field(default_factory=Selection)
    doing: str | None = None
    process: Process | None = None


class _Work(NamedTuple):
    """The clients and the seconds of a round, which are lost if the trial goes back before it."""

    round: int
    clients: int
    seconds: float


class _Loss(NamedTuple):
    """When a process was lost, by `time.monotonic`, and why."""

    time: float
    cause: str


@dataclass
class TrialProgress:
    """Follows a trial over all of its attempts. Times are those of `time.monotonic`.

    Attributes:
        shown: The progress; None until the trial begins or loses a process.
        began: The time at which the trial began; None before.
        loss: The last process that was lost; None once the trial has begun again.
    """

    shown: Progress | None = None
    began: float | None = None
    loss: _Loss | None = None
    process: Process | None = None
    """The process of this attempt's server."""
    _warm: tuple[float, int] | None = None
    """When the first round of this attempt ended, and its number. It takes longer than others."""
    _work: list[_Work] = field(default_factory=list)
    """The rounds since the last checkpoint but one, to which the trial may go back."""
    _saved: int = 0
    """The round of the last checkpoint."""
    _start: int = 0
    """The round after which this attempt began."""

    @property
    def goes_on(self) -> bool:
        """Whether the trial has begun before in this command."""
        if self.shown is None:
            return False
        return self.shown.status in ("running", "stopped") or self.shown.lost > 0

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, done: int) -> list[Event]:
        """Note that the trial begins after round `done`. Return the event of the restart, if this is a restart."""
        now = time.monotonic()
        before = self.shown
        goes_on = self.goes_on
        events = []
        if self.loss is not None and before is not None:
            events.append(self._restart_event(before.round, done, now))
        self._work = [work for work in self._work if goes_on and work.round <= done]
        self._saved = self._start = done
        self._warm = None
        self.loss = None
        progress = Progress(trial, rounds, round=done, rounds_done=min(done, rounds), first_round=done)
        if before is not None and goes_on:
            progress = _continued(before, progress)
        progress.selection = Selection.of(values)
        progress.process = self.process
        self.shown = progress
        if self.began is None or not goes_on:
            self.began = now - progress.seconds
        return events

    def add(self, report: RoundReport) -> None:
        """Note a round that was recorded."""
        assert self.shown is not None, "the trial has begun"
        assert self.began is not None, "the trial has begun"
        progress = self.shown
        record = report.record
        now = time.monotonic()
        progress.round = record.round
        progress.doing = None
        progress.seconds = now - self.began
        progress.clients += record.cohort
        progress.clock = record.clock_seconds
        self._work.append(_Work(record.round, record.cohort, record.seconds["total"]))
        if record.stage == "round":
            self._add_training_round(record.round, now)
        if record.round >= self._start + RENEWING_ROUNDS:
            progress.restarts = 0
        self._add_scores(report)

    def saved(self, round: int) -> None:
        """Note a checkpoint. As the last two are kept, the trial can still go back to the one before."""
        self._work = [work for work in self._work if work.round > self._saved]
        self._saved = round
        if self.shown is not None and round > self._start:
            self.shown.restarts = 0

    def lose(self, trial: str, cause: str, *, counts: bool) -> Progress:
        """Note that a process was lost, and return the progress until then; see `Progress.restarts` for `counts`."""
        if self.shown is None:
            self.shown = Progress(trial, 0)
        self.shown.lost += 1
        self.shown.restarts += counts
        self.loss = _Loss(time.monotonic(), cause)
        return self.shown

    def _add_training_round(self, round: int, now: float) -> None:
        assert self.shown is not None, "the trial has begun"
        self.shown.rounds_done = round
        if self._warm is None:
            self._warm = now, round
        since, first = self._warm
        if round > first:
            seconds = (now - since) / (round - first)
            self.shown.left = seconds * max(0, self.shown.rounds - round)

    def _add_scores(self, report: RoundReport) -> None:
        assert self.shown is not None, "the trial has begun"
        progress = self.shown
        selection = self.shown.selection
        val = report.mean(selection.point, "val", selection.metric)
        test = report.mean(selection.point, "test", selection.metric)
        if test is not None:
            progress.test = test
        if val is None:
            return
        progress.val = val
        best = progress.best_val
        is_better = best is None or selection.gain(val) > selection.gain(best)
        if is_better and not math.isnan(val):
            progress.best_val = val

    def _restart_event(self, round: int, done: int, now: float) -> Event:
        assert self.loss is not None, "the trial has lost a process"
        goes_on = "starts again at round 1"
        if done:
            goes_on = f"continues after round {done}"
        repeated = [work for work in self._work if work.round > done]
        lost_seconds = sum(work.seconds for work in repeated)
        return Event(
            event="trial restarted",
            detail=f"{self.loss.cause}; {goes_on}",
            round=round,
            redone=sum(work.clients for work in repeated),
            seconds=now - self.loss.time + lost_seconds,
        )


def _continued(before: Progress, progress: Progress) -> Progress:
    """Return the progress of a trial that begins again at `progress`."""
    first_round = progress.first_round
    if before.rounds:  # else it never began before
        first_round = min(before.first_round, first_round)
    best_val = None
    if progress.round:
        best_val = before.best_val
    return replace(
        before,
        rounds=progress.rounds,
        status="running",
        round=progress.round,
        rounds_done=progress.rounds_done,
        first_round=first_round,
        best_val=best_val,
    )
