"""The recorder, which keeps what trials produce: Parquet tables, checkpoints, and the progress of each trial.

One recorder serves many trials. Without Ray it is called directly; with Ray it is an actor on the node where the
command runs, so that all results arrive there, whichever node a trial runs on. Such an actor may die and be started
again. It knows nothing then: the trials begin again, from the last round that is on disk, and send the later ones once
more (see `rayfed.distributed.recording`).
"""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfed.core.best_round import Selection
from rayfed.core.errors import UsageError
from rayfed.core.pace import Pace
from rayfed.core.records import Event, Record
from rayfed.core.working_folder import working_folder
from rayfed.records.checkpoints import CheckpointStore, Part
from rayfed.records.folder import join
from rayfed.records.holdings import Holding, write_holdings
from rayfed.records.maps import write_map
from rayfed.records.owners import Owner
from rayfed.records.storage import open_storage, storage_errors
from rayfed.records.tracking import Feed
from rayfed.records.trials import record_trial
from rayfed.records.writer import TrialWriter

_TRACEBACKS = "tracebacks"


@dataclass
class Progress:
    """The progress of a trial.

    `left` are the seconds that its rounds will still take, None while that is unknown. `val` and `test` are the last
    values of the metric of `selection` (means over clients), or None. `lost` is how often the process of the trial was
    lost, so that it went back to its last checkpoint. `stop_reason` says why it stopped early, if it did. `round` is
    the last one that was recorded, which may be the final stage; `rounds_done` counts rounds of training. `doing` says
    what the trial does after a round, if that may take long.
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
    lost: int = 0
    stop_reason: str | None = None
    selection: Selection = field(default_factory=Selection)
    doing: str | None = None


def traceback_file(folder: str, experiment: str, trial: str) -> str:
    """Return where the traceback of a trial that failed or diverged is, a path or a URL."""
    return f"{join(folder, experiment)}/{_TRACEBACKS}/{trial}.txt"


class NotBegun(RuntimeError):
    """The recorder does not know a trial, since it was started again after the trial began."""


@dataclass
class Sign:
    """The last sign of life of the process that runs a trial.

    Attributes:
        process: Its process id and the id of its Ray node.
        silent: The seconds since then.
    """

    trial: str
    process: tuple[int, str]
    silent: float = 0.0


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
        self._writers: dict[str, TrialWriter] = {}
        self._progress: dict[str, Progress] = {}
        self._began: dict[str, float] = {}
        self._paces: dict[str, Pace] = {}
        self._last_record: dict[str, float] = {}  # by trial, when it began or recorded a round
        self._signs: dict[str, tuple[tuple[int, str], float]] = {}  # by trial, its process and when it gave a sign
        self._events: dict[str, list[Event]] = {}  # of trials that have not begun
        self._lost_at: dict[str, float] = {}  # trials whose process was lost, and that have not begun again
        self._work: dict[str, list[tuple[int, int, float]]] = {}  # by trial, each round with its clients and seconds
        self._owner: Owner | None = None
        self._feed = Feed(self._home, experiment, working_folder(), in_sweep=in_sweep)

    def begin(
        self,
        trial: str,
        values: Mapping[str, Any],
        rounds: int,
        keep_through_round: int | None,
        holdings: Sequence[Holding] = (),
    ) -> None:
        """Start a trial, or continue it after `keep_through_round`.

        Args:
            values: the trial's columns in `trials`.
            rounds: the number of rounds that it is going to have.
            holdings: who holds how many examples of which class, recorded once for each `partition_hash`.

        Raises:
            UsageError: another process is running the trial.
        """
        with storage_errors(self._home.location):
            self._begin(trial, values, rounds, keep_through_round)
            if holdings and values.get("partition_hash"):
                write_holdings(self._home, values["partition_hash"], holdings)
        self._feed.begin(trial, values, keep_through_round)

    def _begin(self, trial: str, values: Mapping[str, Any], rounds: int, keep_through_round: int | None) -> None:
        if self._owner is None:
            self._owner = Owner(self._home)
        record_trial(
            self.folder,
            self.experiment,
            trial,
            {**values, "status": "running", "error": None, "traceback": None, "owner": self._owner.name},
        )
        self._home.child(_TRACEBACKS).delete(f"{trial}.txt")
        before = self._progress.get(trial)
        again = before is not None and (before.status == "running" or before.lost > 0)
        name, seed = str(values["algorithm"]["name"]), int(values["seed"])
        if keep_through_round is None:  # a resume must not use the checkpoint of an earlier attempt
            self._checkpoints_of(trial).delete()
        writer = TrialWriter(
            self.folder,
            self.experiment,
            trial,
            name,
            seed,
            keep_through_round=keep_through_round,
            keep_events=again,
        )
        self._writers[trial] = writer
        writer.add_events(self._events.pop(trial, []))
        done = keep_through_round or 0
        rounds_done = min(done, rounds)
        if trial in self._lost_at and before is not None:
            writer.add_events([self._restart_event(trial, before.round, done)])
        self._work[trial] = [work for work in self._work.get(trial, []) if again and work[0] <= done]
        if before is not None and again:
            best = before.best_val if done else None
            first = before.first_round if before.rounds else done
            self._progress[trial] = replace(
                before,
                rounds=rounds,
                status="running",
                round=done,
                rounds_done=rounds_done,
                first_round=min(first, done),
                best_val=best,
            )
        else:
            self._progress[trial] = Progress(trial, rounds, round=done, rounds_done=rounds_done, first_round=done)
            self._began[trial] = time.monotonic()
        self._began.setdefault(trial, time.monotonic() - self._progress[trial].seconds)
        self._progress[trial].selection = Selection.of(values)
        self._paces[trial] = Pace(rounds, int(values.get("evaluate", {}).get("every", 1)))
        self._last_record[trial] = time.monotonic()

    def record(self, trial: str, record: Record) -> int | None:
        """Record a finished round, and return the last round that is on disk, or None.

        Raises:
            NotBegun: this recorder was started after the trial began.
        """
        writer = self._writer(trial)
        writer.add_scores(record.round, record.scores)
        writer.add_round(record)
        with storage_errors(self._home.location):
            writer.add_events(record.events)
            writer.flush()
            for map in record.maps:
                write_map(self._home.child("maps"), trial, record.round, map)
        self._feed.record(trial, record)
        progress = self._progress[trial]
        progress.round, progress.doing = record.round, None
        if record.stage == "round":
            progress.rounds_done = record.round
        progress.clients += record.cohort
        self._work[trial].append((record.round, record.cohort, record.seconds["total"]))
        now, pace = time.monotonic(), self._paces[trial]
        progress.seconds = now - self._began[trial]
        if record.stage == "round":
            pace.add(record.round, now - self._last_record[trial])
            progress.left = pace.left(record.round)
        self._last_record[trial] = now
        selection = progress.selection
        means = record.means(selection.metric, selection.point)
        progress.val, progress.test = means.get("val", progress.val), means.get("test", progress.test)
        values = [v for v in (progress.best_val, progress.val) if v is not None and not math.isnan(v)]
        progress.best_val = max(values, key=selection.gain, default=None)
        return writer.written_round

    def event(self, trial: str, event: Event) -> None:
        """Record something that happened to the processes of a trial, whether or not it has begun."""
        if trial in self._writers:
            with storage_errors(self._home.location):
                self._writers[trial].add_events([event])
        else:
            self._events.setdefault(trial, []).append(event)

    def doing(self, trial: str, what: str) -> None:
        """Note for the progress line what the trial does after a round."""
        if trial in self._progress:
            self._progress[trial].doing = what

    def begin_checkpoint(self, trial: str) -> int:
        """Return the number of the next checkpoint, after everything that was recorded before is on disk.

        Raises:
            NotBegun: this recorder was started after the trial began.
        """
        with storage_errors(self._home.location):
            self._writer(trial).flush(force=True)
            return self._checkpoints_of(trial).begin()

    def write_states(self, trial: str, number: int, states: Mapping[str, bytes]) -> None:
        """Write states for a checkpoint; see `CheckpointStore.write`."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).write(number, states)

    def commit_checkpoint(
        self, trial: str, number: int, base: int | None, header: Mapping[str, Any], parts: Mapping[str, Part]
    ) -> None:
        """Finish a checkpoint; see `CheckpointStore.commit`."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).commit(number, base, header, parts)

    def saved(self, trial: str) -> list[dict[str, Any]]:
        """Return the trial's checkpoints, newest first; see `CheckpointStore.saved`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).saved()

    def saved_best(self, trial: str) -> dict[str, Any] | None:
        """Return the content of the checkpoint of the best round; see `CheckpointStore.best`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).best()

    def saved_states(self, trial: str, parts: Mapping[str, Part]) -> dict[str, bytes]:
        """Return the content of files of the trial's checkpoints; see `CheckpointStore.read`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).read(parts)

    def save_profile(self, trial: str, name: str, content: bytes) -> None:
        """Write a file of the profile of a trial to the folder `profile`."""
        with storage_errors(self._home.location):
            self._home.child("profile", trial).write(name, content)

    def end(self, trial: str, values: Mapping[str, Any], *, begun: bool = False) -> None:
        """End a trial; `values` has its status and other columns of `trials`.

        Args:
            begun: whether only a trial is ended that this recorder knows.

        Raises:
            NotBegun: with `begun`, this recorder was started after the trial began.
        """
        if begun:
            self._writer(trial)
        with storage_errors(self._home.location):
            try:
                if trial in self._writers:
                    self._writers.pop(trial).close()
            finally:  # rows may be lost to a full disk, which the row of the trial should tell
                self._end(trial, values)

    def _end(self, trial: str, values: Mapping[str, Any]) -> None:
        self._signs.pop(trial, None)
        progress = self._progress.setdefault(trial, Progress(trial, 0))
        progress.status, progress.error = str(values["status"]), values.get("error")
        progress.doing = None
        progress.has_traceback = values.get("traceback") is not None
        progress.stop_reason = values.get("stop_reason")
        self._feed.end(trial, progress.status, progress.error)
        measured: dict[str, Any] = {}
        if trial in self._began:
            measured = {"seconds": progress.seconds, "rounds_done": progress.rounds_done}
        if not measured:
            self._owner = self._owner or Owner(self._home)
            measured = {"owner": self._owner.name}
        try:
            record_trial(self.folder, self.experiment, trial, {**measured, **values})
        except UsageError as error:  # another process runs it, so the row is not this recorder's
            progress.error = str(error)
            return
        if trace := values.get("traceback"):
            with contextlib.suppress(OSError):  # on a full disk, for which the row has room set aside
                self._home.child(_TRACEBACKS).write(f"{trial}.txt", trace.encode())
        if (events := self._events.pop(trial, None)) and "algorithm" in values:  # it never began
            name, seed = str(values["algorithm"]["name"]), int(values["seed"])
            TrialWriter(self.folder, self.experiment, trial, name, seed).add_events(events)

    def lost(self, trial: str, event: Event) -> int:
        """Note that the process of a trial was lost, and return how often that has happened."""
        progress = self._progress.setdefault(trial, Progress(trial, 0))
        progress.lost += 1
        self._lost_at[trial] = time.monotonic()
        self._signs.pop(trial, None)
        self.event(trial, replace(event, round=progress.round))
        return progress.lost

    def attempts(self, trial: str) -> tuple[int, bool]:
        """Return how often the process of a trial was lost in this command, and whether the trial has begun in it."""
        progress = self._progress.get(trial)
        return (0, False) if progress is None else (progress.lost, progress.rounds > 0)

    def alive(self, trial: str, process: tuple[int, str]) -> None:
        """Take a sign of life of the process that runs a trial."""
        self._signs[trial] = process, time.monotonic()

    def signs(self) -> list[Sign]:
        """Return the last sign of life of each trial that runs."""
        now = time.monotonic()
        return [Sign(trial, process, now - then) for trial, (process, then) in self._signs.items()]

    def adopt(self, known: Iterable[Progress]) -> None:
        """Take over what another recorder knew of the trials' progress before it died."""
        for progress in known:
            if (own := self._progress.get(progress.trial)) is None:
                self._progress[progress.trial] = progress
            else:
                own.lost = max(own.lost, progress.lost)

    def close(self) -> list[str]:
        """Give up the claim to the trials, which have ended, and return a line on each tracker that failed."""
        lines = self._feed.close()
        if self._owner is not None:
            self._owner.release()
            self._owner = None
        return lines

    def pid(self) -> int:
        """Return the id of the recorder's process."""
        return os.getpid()

    def progress(self) -> list[Progress]:
        """Return the progress of all trials."""
        return list(self._progress.values())

    def _restart_event(self, trial: str, round: int, done: int) -> Event:
        repeated = [work for work in self._work.get(trial, []) if work[0] > done]
        return Event(
            event="trial restarted",
            detail=f"continues after round {done}" if done else "starts again at round 1",
            round=round,
            redone=sum(clients for _, clients, _ in repeated),
            seconds=time.monotonic() - self._lost_at.pop(trial) + sum(seconds for *_, seconds in repeated),
        )

    def _writer(self, trial: str) -> TrialWriter:
        if trial not in self._writers:
            raise NotBegun(f"the recorder does not know {trial}")
        return self._writers[trial]

    def _checkpoints_of(self, trial: str) -> CheckpointStore:
        return CheckpointStore(self._home, trial)
