"""The recorder, which keeps what trials produce: Parquet tables, checkpoints, and the progress of each trial.

One recorder serves all trials of a command. Without Ray it is called directly. With Ray it is an actor on the node of
the command, so that all results arrive there, whichever node a trial runs on.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.paths import lasting, working_folder
from rayfed.core.records import Event, Record, Selection
from rayfed.records.checkpoints import CheckpointStore, SavedPart
from rayfed.records.files import Holding, TrialWriter, write_holdings, write_map
from rayfed.records.storage import join, open_storage, storage_errors
from rayfed.records.tracking import TensorBoard
from rayfed.records.trials import Owner, record_trial

_TRACEBACKS = "tracebacks"


@dataclass
class Progress:
    """The progress of a trial.

    Attributes:
        round: The last round that was recorded, which may be the final stage; `rounds_done` counts training rounds.
        left: The expected seconds of the remaining rounds; None while they are unknown.
        val, test: The last values of the metric of `selection`, as means over clients.
        clock: The seconds on the simulated clock; None without one.
        lost: How often the trial lost a process and went back to its last checkpoint.
        stop_reason: The reason of an early stop.
        doing: What the trial does after a round, if that may take long.
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
    stop_reason: str | None = None
    selection: Selection = field(default_factory=Selection)
    doing: str | None = None


def traceback_file(folder: str, experiment: str, trial: str) -> str:
    """Return the path or URL of the traceback of a trial that failed or diverged."""
    return f"{join(folder, experiment)}/{_TRACEBACKS}/{trial}.txt"


@dataclass
class _Trial:
    """The recorder's knowledge of a trial. Times are those of `time.monotonic`.

    Attributes:
        progress: None until the trial begins or loses a process.
        writer: The writer of its rows; None unless the trial runs.
        began: The time at which the trial began; None before.
        warm: The time and the number of the first round of this attempt, which took longer; None before.
        work: Each round with its number of clients and its seconds.
        lost: When and why a process was lost; None once the trial has begun again.
    """

    progress: Progress | None = None
    writer: TrialWriter | None = None
    began: float | None = None
    warm: tuple[float, int] | None = None
    work: list[tuple[int, int, float]] = field(default_factory=list)
    lost: tuple[float, str] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the trial has begun before in this command."""
        return self.progress is not None and (self.progress.status == "running" or self.progress.lost > 0)

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, done: int) -> list[Event]:
        """Note that the trial begins after round `done`. Return the event of the restart, if this is a restart."""
        now, before, goes_on = time.monotonic(), self.progress, self.goes_on
        progress = Progress(trial, rounds, round=done, rounds_done=min(done, rounds), first_round=done)
        if before is not None and goes_on:
            progress = replace(
                before,
                rounds=rounds,
                status="running",
                round=done,
                rounds_done=progress.rounds_done,
                first_round=min(before.first_round, done) if before.rounds else done,
                best_val=before.best_val if done else None,
            )
        events = []
        if self.lost is not None and before is not None:
            events.append(self._restart_event(before.round, done, now - self.lost[0], self.lost[1]))
        self.work = [work for work in self.work if goes_on and work[0] <= done]
        progress.selection = Selection.of(values)
        self.progress, self.lost, self.warm = progress, None, None
        if self.began is None or not goes_on:
            self.began = now - progress.seconds
        return events

    def add(self, record: Record) -> None:
        """Update the progress by a round that was recorded."""
        assert self.progress is not None and self.began is not None, "the trial has begun"  # noqa: PT018
        progress, now = self.progress, time.monotonic()
        progress.round, progress.doing, progress.seconds = record.round, None, now - self.began
        progress.clients += record.cohort
        progress.clock = record.clock_seconds
        self.work.append((record.round, record.cohort, record.seconds["total"]))
        if record.stage == "round":
            progress.rounds_done = record.round
            since, first = self.warm = self.warm or (now, record.round)
            if record.round > first:
                progress.left = (now - since) / (record.round - first) * max(0, progress.rounds - record.round)
        means = record.means(progress.selection.metric, progress.selection.point)
        progress.val, progress.test = means.get("val", progress.val), means.get("test", progress.test)
        values = [v for v in (progress.best_val, progress.val) if v is not None and not math.isnan(v)]
        progress.best_val = max(values, key=progress.selection.gain, default=None)

    def _restart_event(self, round: int, done: int, seconds: float, cause: str) -> Event:
        goes_on = f"continues after round {done}" if done else "starts again at round 1"
        repeated = [work for work in self.work if work[0] > done]
        return Event(
            event="trial restarted",
            detail=f"{cause}; {goes_on}",
            round=round,
            redone=sum(clients for _, clients, _ in repeated),
            seconds=seconds + sum(seconds for *_, seconds in repeated),
        )


class Recorder:
    """Writes the results of trials to `<folder>/<experiment>/`.

    Methods that write or read raise `StorageError` if the disk or the object store fails.

    Args:
        folder: A path or URL; see `rayfed.records.storage.open_storage`.
        in_sweep: Whether the trials belong to a sweep, where TensorBoard's files are written unless declined.
    """

    def __init__(self, folder: str, experiment: str, *, in_sweep: bool = False):
        self.folder, self.experiment = folder, experiment
        self._home = open_storage(folder).child(experiment)
        self._trials: defaultdict[str, _Trial] = defaultdict(_Trial)
        self._owner: Owner | None = None
        self._tensorboard = TensorBoard(self._home, working_folder() / lasting(""), in_sweep=in_sweep)

    def begin(
        self,
        trial: str,
        values: Mapping[str, Any],
        rounds: int,
        keep_through_round: int | None,
        holdings: Sequence[Holding] = (),
    ) -> None:
        """Start a trial of `rounds` rounds, or continue it after `keep_through_round`.

        Args:
            values: The trial's columns in `trials`.
            holdings: The examples of each class that each client holds, recorded once for each `partition_hash`.

        Raises:
            UsageError: Another process is running the trial.
        """
        with storage_errors(self._home.location):
            self._owner = self._owner or Owner(self._home)
            beginning = {"status": "running", "error": None, "traceback": None, "owner": self._owner.name}
            record_trial(self.folder, self.experiment, trial, {**values, **beginning})
            self._home.child(_TRACEBACKS).delete(f"{trial}.txt")
            if keep_through_round is None:  # a later resume must not use checkpoints of an earlier attempt
                self._checkpoints_of(trial).delete()
            known = self._trials[trial]
            known.writer = TrialWriter(
                self.folder,
                self.experiment,
                trial,
                str(values["algorithm"]["name"]),
                int(values["seed"]),
                keep_through_round=keep_through_round,
                keep_events=known.goes_on,
            )
            known.writer.add_events(known.begin(trial, values, rounds, keep_through_round or 0))
            if holdings and values.get("partition_hash"):
                write_holdings(self._home, values["partition_hash"], holdings)
        self._tensorboard.begin(trial, values, keep_through_round)

    def record(self, trial: str, record: Record) -> None:
        """Record a finished round of a trial that has begun."""
        writer = self._writer(trial)
        with storage_errors(self._home.location):
            writer.add(record)
            writer.flush()
            if record.vmap_clients is not None:
                record_trial(self.folder, self.experiment, trial, {"vmap_clients": record.vmap_clients})
            for map in record.maps:
                write_map(self._home.child("maps"), trial, record.round, map)
        self._tensorboard.record(trial, record)
        self._trials[trial].add(record)

    def event(self, trial: str, event: Event) -> None:
        """Record something that happened to a trial that has begun."""
        with storage_errors(self._home.location):
            self._writer(trial).add_events([event])

    def doing(self, trial: str, what: str) -> None:
        """Note for the progress line what the trial does after a round."""
        if (progress := self._trials[trial].progress) is not None:
            progress.doing = what

    def begin_checkpoint(self, trial: str) -> int:
        """Return the number of the next checkpoint, after writing all recorded rows to disk."""
        with storage_errors(self._home.location):
            self._writer(trial).flush(force=True)
            return self._checkpoints_of(trial).begin()

    def write_states(self, trial: str, number: int, states: Mapping[str, bytes]) -> None:
        """Write states for a checkpoint; see `CheckpointStore.write`."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).write(number, states)

    def commit_checkpoint(
        self, trial: str, number: int, base: int | None, header: Mapping[str, Any], parts: Mapping[str, SavedPart]
    ) -> None:
        """Finish a checkpoint; see `CheckpointStore.commit`."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).commit(number, base, header, parts)

    def delete_checkpoints(self, trial: str) -> None:
        """Delete all checkpoints of a trial that is done."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).delete()

    def saved(self, trial: str) -> list[dict[str, Any]]:
        """Return the trial's checkpoints, newest first; see `CheckpointStore.saved`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).saved()

    def saved_best(self, trial: str) -> dict[str, Any] | None:
        """Return the content of the checkpoint of the best round; see `CheckpointStore.best`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).best()

    def saved_states(self, trial: str, parts: Mapping[str, SavedPart]) -> dict[str, bytes]:
        """Return the content of files of the trial's checkpoints; see `CheckpointStore.read`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).read(parts)

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        """End a trial; `values` has its status and other columns of `trials`."""
        with storage_errors(self._home.location):
            try:
                writer, self._trials[trial].writer = self._trials[trial].writer, None
                if writer is not None:
                    writer.flush(force=True)
            finally:  # if a full disk loses rows, the row of the trial says so
                self._end(trial, values)

    def _end(self, trial: str, values: Mapping[str, Any]) -> None:
        known = self._trials[trial]
        progress = known.progress = known.progress or Progress(trial, 0)
        progress.status, progress.error, progress.doing = str(values["status"]), values.get("error"), None
        progress.has_traceback = values.get("traceback") is not None
        progress.stop_reason = values.get("stop_reason")
        self._tensorboard.end(trial, progress.status)
        measured: dict[str, Any] = {"seconds": progress.seconds, "rounds_done": progress.rounds_done}
        if known.began is None:
            self._owner = self._owner or Owner(self._home)
            measured = {"owner": self._owner.name}
        try:
            record_trial(self.folder, self.experiment, trial, {**measured, **values})
        except UsageError as error:  # another process runs the trial, and owns its row
            progress.error = str(error)
            return
        if trace := values.get("traceback"):
            with contextlib.suppress(OSError):  # on a full disk, for which the row has room set aside
                self._home.child(_TRACEBACKS).write(f"{trial}.txt", trace.encode())

    def lost(self, trial: str, cause: str) -> Progress:
        """Note that a process of a trial was lost, and return the progress until then."""
        known = self._trials[trial]
        progress = known.progress = known.progress or Progress(trial, 0)
        progress.lost += 1
        known.lost = time.monotonic(), cause
        return progress

    def has_begun(self, trial: str) -> bool:
        """Return whether a trial has begun in this command."""
        progress = self._trials[trial].progress
        return progress is not None and progress.rounds > 0

    def close(self) -> list[str]:
        """Release the claim to the trials, which have ended, and return a line on each failure of TensorBoard."""
        lines = self._tensorboard.close()
        if self._owner is not None:
            self._owner.release()
            self._owner = None
        return lines

    def progress(self) -> list[Progress]:
        """Return the progress of all trials."""
        return [known.progress for known in list(self._trials.values()) if known.progress is not None]

    def _writer(self, trial: str) -> TrialWriter:
        writer = self._trials[trial].writer
        assert writer is not None, "the trial has begun"
        return writer

    def _checkpoints_of(self, trial: str) -> CheckpointStore:
        return CheckpointStore(self._home, trial)
