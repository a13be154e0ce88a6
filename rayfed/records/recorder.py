"""The recorder, which keeps what trials produce: Parquet tables, checkpoints, and the progress of each trial.

One recorder serves all trials of a command. Without Ray it is called directly. With Ray it is an actor on the node of
the command, so that all results arrive there, whichever node a trial runs on.

Rounds wait in memory. Those that no checkpoint waits for are written together for all trials, in a small share of the
time. A checkpoint first writes the rounds before it, so that a trial that goes back to it finds their rows.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.machine import Process
from rayfed.core.paths import lasting, working_folder
from rayfed.core.round_record import Event, Record
from rayfed.records.checkpoint_store import CheckpointStore, SavedPart
from rayfed.records.files import ClientRow, Holding, write_clients, write_holdings, write_map
from rayfed.records.mlflow_runs import MlflowRuns
from rayfed.records.owners import Owner
from rayfed.records.progress import Progress, TrialProgress
from rayfed.records.round_report import RoundReport
from rayfed.records.storage import join, open_storage, storage_errors
from rayfed.records.tracking import TensorBoard, Tracker, Trackers
from rayfed.records.trials import record_trial
from rayfed.records.wandb_runs import WandbRuns
from rayfed.records.writer import ExperimentFiles, TrialWriter, WritingBudget

MOST_WAITING_BYTES = 2**26
"""The bytes of rounds that wait in memory, of all trials together, before they are written in any case."""
MOST_PINNED = 4
"""The checkpoints of a trial that are kept because Tune knows them, beside the last two."""
_TRACEBACKS = "tracebacks"
# a disk and an object store take several files at a time
_DISK_THREADS = 4
_STORE_THREADS = 16


def traceback_file(folder: str, experiment: str, trial: str) -> str:
    """Return the path or URL of the traceback of a trial that failed or diverged."""
    return f"{join(folder, experiment)}/{_TRACEBACKS}/{trial}.txt"


@dataclass
class _Trial:
    """The recorder's knowledge of a trial.

    Attributes:
        writer: The writer of its rows; None unless the trial runs.
        failure: Why rows could not be written that waited when another trial's round was recorded.
        ending: The round after which the trial ends, and its last columns in `trials`; None unless that was said before
            the round has arrived.
        pinned: The last checkpoints that Tune knows, for trials that go on from them.
        adopted: The checkpoint from which the trial went on with other hyperparameters, and their hash.
        outlived: Whether the trial has ended, and its checkpoints stay until the command ends.
        change: The number of the last change of the progress, see `Recorder.changed_progress`.
    """

    progress: TrialProgress = field(default_factory=TrialProgress)
    writer: TrialWriter | None = None
    failure: Exception | None = None
    ending: tuple[int, Mapping[str, Any]] | None = None
    pinned: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_PINNED))
    adopted: tuple[str, int, str] | None = None
    outlived: bool = False
    change: int = 0


class Recorder:
    """Writes the results of trials to `<folder>/<experiment>/`.

    Methods that write or read raise `StorageError` if the disk or the object store fails.

    Args:
        folder: A path or URL; see `rayfed.records.storage.open_storage`.
        in_sweep: Whether the trials belong to a sweep, where TensorBoard's files are written unless declined.
    """

    def __init__(self, folder: str, experiment: str, *, in_sweep: bool = False):
        self.folder = folder
        self.experiment = experiment
        self._home = open_storage(folder).child(experiment)
        self._files = ExperimentFiles(folder, experiment)
        self._budget = WritingBudget()
        self._waiting_bytes = 0
        self._trials: defaultdict[str, _Trial] = defaultdict(_Trial)
        self._of_tuner: dict[str, str] = {}  # names of trials by Tune's id, in a `Tuner` of the user's own
        self._changes = 0
        self._owner: Owner | None = None
        board = TensorBoard(self._home, working_folder() / lasting(""), in_sweep=in_sweep)
        makers: dict[str, Callable[[], Tracker]] = {
            "tracking.wandb": partial(WandbRuns, self._home.local, experiment),
            "tracking.mlflow": partial(MlflowRuns, experiment),
        }
        self._trackers = Trackers([board], makers, self._files.values)

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
            known.ending = known.failure = None
            if known.writer is not None and keep_through_round is not None:
                self._write_rows(known.writer)  # a trial that goes on from another one's state keeps its own rounds
            known.writer = TrialWriter(
                self._files,
                trial,
                str(values["algorithm"]["name"]),
                int(values["seed"]),
                keep_through_round=keep_through_round,
                keep_events=known.progress.goes_on,
            )
            known.writer.add_events(known.progress.begin(trial, values, rounds, keep_through_round or 0))
            if holdings and values.get("partition_hash"):
                write_holdings(self._home, values["partition_hash"], holdings)
        self._changed(known)
        self._trackers.begin(trial, values, keep_through_round)

    def clients(self, trial: str, rows: Sequence[ClientRow]) -> None:
        """Write who the clients of a trial are, where they have roles."""
        with storage_errors(self._home.location):
            write_clients(self._home, trial, rows)

    def record(self, trial: str, record: Record) -> RoundReport:
        """Record a finished round of a trial that has begun, and return what is recorded of it."""
        report = RoundReport.of(record)
        self.add(trial, report)
        return report

    def add(self, trial: str, report: RoundReport) -> None:
        """Record a finished round of a trial that has begun.

        A round that arrives after the trial was ended by the command is left out.
        """
        known = self._trials[trial]
        record = report.record
        if known.writer is None:
            return
        with storage_errors(self._home.location):
            known.writer.add(report)
            self._waiting_bytes += report.nbytes
            if not self._budget.is_spent or self._waiting_bytes > MOST_WAITING_BYTES:
                self._write_waiting()
            if known.failure is not None:
                raise known.failure
            if record.vmap_clients is not None:
                record_trial(self.folder, self.experiment, trial, {"vmap_clients": record.vmap_clients})
            for map in record.maps:
                write_map(self._home.child("maps"), trial, record.round, map)
        known.progress.add(report)
        self._changed(known)
        self._trackers.record(trial, record.round, report.values)
        if known.ending is not None and record.round >= known.ending[0]:
            self._finish(trial, known.ending[1])

    def _write_waiting(self) -> None:
        """Write the rounds that wait of all trials."""
        waiting = []
        for known in self._trials.values():
            if known.writer is not None and known.writer.waiting_bytes:
                waiting.append(known)
        with self._budget.spending():
            if len(waiting) == 1:
                _write(waiting[0])
                return
            if self._home.local is None:
                threads = _STORE_THREADS
            else:
                threads = _DISK_THREADS
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_write, waiting))
        self._waiting_bytes = sum(known.writer.waiting_bytes for known in waiting if known.writer is not None)

    def event(self, trial: str, event: Event) -> None:
        """Record something that happened to a trial that has begun."""
        with storage_errors(self._home.location):
            self._writer(trial).add_events([event])

    def runs_in(self, trial: str, process: Process) -> None:
        """Note the process of Ray in which the server of a trial is going to begin."""
        known = self._trials[trial]
        known.progress.process = process
        if known.progress.shown is not None:
            known.progress.shown.process = process
            self._changed(known)

    def doing(self, trial: str, what: str) -> None:
        """Note for the progress line what the trial does after a round."""
        known = self._trials[trial]
        if known.progress.shown is not None:
            known.progress.shown.doing = what
            self._changed(known)

    def begin_checkpoint(self, trial: str) -> int:
        """Return the number of the next checkpoint, after writing all recorded rows to disk."""
        with storage_errors(self._home.location):
            self._write_rows(self._writer(trial))
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
        self._trials[trial].progress.saved(header["round"])

    def delete_checkpoints(self, trial: str) -> None:
        """Delete all checkpoints of a trial that is done; later, if others may still go on from them."""
        if self._trials[trial].pinned:
            self._trials[trial].outlived = True
            return
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).delete()

    def saved(self, trial: str) -> list[dict[str, Any]]:
        """Return the trial's checkpoints, newest first; see `CheckpointStore.saved`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).saved()

    def pin(self, trial: str, number: int) -> None:
        """Keep a checkpoint, from which this trial or another one may go on."""
        pinned = self._trials[trial].pinned
        if number not in pinned:
            pinned.append(number)

    def adopt(self, trial: str, configuration: str, source: str, number: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the checkpoints from which a trial goes on, and whether a checkpoint of `source` was copied for that.

        A trial that starts again goes on from what it has saved since.

        Args:
            configuration: The hash of the configuration with which the trial goes on.
        """
        known = self._trials[trial]
        store = self._checkpoints_of(trial)
        with storage_errors(self._home.location):
            saved = store.saved()
            own = {one["content"]["configuration"] for one in saved[:1] if "content" in one}
            is_own = source == trial and configuration in own
            origin = source, number, configuration
            if is_own or known.adopted == origin:
                return saved, False
            store.adopt(self._checkpoints_of(source), number, configuration)
            known.adopted = origin
            return store.saved(), True

    def saved_best(self, trial: str) -> dict[str, Any] | None:
        """Return the content of the checkpoint of the best round; see `CheckpointStore.best`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).best()

    def saved_states(self, trial: str, parts: Mapping[str, SavedPart]) -> dict[str, bytes]:
        """Return the content of files of the trial's checkpoints; see `CheckpointStore.read`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).read(parts)

    def end(self, trial: str, values: Mapping[str, Any], *, after_round: int = 0) -> None:
        """End a trial.

        Args:
            values: Its status and other columns of `trials`.
            after_round: The last round that the process of the trial has sent. If it has not arrived yet, the trial
                ends once it has.
        """
        known = self._trials[trial]
        shown = known.progress.shown
        if known.writer is not None and shown is not None and shown.round < after_round:
            known.ending = after_round, values
            shown.status = str(values["status"])
            self._changed(known)
            return
        self._finish(trial, values)

    def _finish(self, trial: str, values: Mapping[str, Any]) -> None:
        known = self._trials[trial]
        writer = known.writer
        known.writer = None
        known.ending = None
        with storage_errors(self._home.location):
            try:
                if writer is not None:
                    self._write_rows(writer)
            finally:  # if a full disk loses rows, the row of the trial says so
                self._record_end(trial, known, values)

    def _record_end(self, trial: str, known: _Trial, values: Mapping[str, Any]) -> None:
        if known.progress.shown is None:
            known.progress.shown = Progress(trial, 0)
        progress = known.progress.shown
        progress.status = str(values["status"])
        progress.error = values.get("error")
        progress.doing = None
        progress.has_traceback = values.get("traceback") is not None
        progress.stop_reason = values.get("stop_reason")
        self._changed(known)
        self._trackers.end(trial, progress.status)
        measured: dict[str, Any] = {"seconds": progress.seconds, "rounds_done": progress.rounds_done}
        if known.progress.began is None:
            self._owner = self._owner or Owner(self._home)
            measured = {"owner": self._owner.name}
        try:
            record_trial(self.folder, self.experiment, trial, {**measured, **values})
        except UsageError as error:  # another process runs the trial, and owns its row
            progress.error = str(error)
            return
        trace = values.get("traceback")
        if trace:
            with contextlib.suppress(OSError):  # on a full disk, for which the row has room set aside
                self._home.child(_TRACEBACKS).write(f"{trial}.txt", trace.encode())

    def lost(self, trial: str, cause: str, *, counts: bool = True) -> Progress:
        """Note that a process of a trial was lost, and return the progress until then.

        Args:
            counts: Whether `faults.restarts` limits such losses.
        """
        known = self._trials[trial]
        self._changed(known)
        return known.progress.lose(trial, cause, counts=counts)

    def name_for(self, trial: str, tuner_id: str, wanted: str | None) -> tuple[str, bool]:
        """Return the name under which a trial of the user's own `Tuner` is recorded, and whether it goes on.

        A `Tuner` may have two trials of one configuration. The second one gets a name of its own. A trial of a later
        `Tuner` takes the place of the earlier one once that has ended.

        Args:
            trial: The name of its configuration.
            tuner_id: Tune's id of the trial.
            wanted: The name in a checkpoint of its own, from an earlier command; None without one.
        """
        if tuner_id in self._of_tuner:
            return self._of_tuner[tuner_id], True
        name = wanted or trial
        holders = [other for other, known in self._of_tuner.items() if known == name]
        if holders:
            shown = self._trials[name].progress.shown
            has_ended = shown is not None and shown.status in ("done", "failed", "diverged")
            is_repeated = any(_tuner_of(other) == _tuner_of(tuner_id) for other in holders)
            if is_repeated or not has_ended:
                name = f"{trial}-{tuner_id}"
        self._of_tuner = {other: known for other, known in self._of_tuner.items() if known != name}
        self._of_tuner[tuner_id] = name
        return name, wanted is not None

    def has_begun(self, trial: str) -> bool:
        """Return whether a trial has begun in this command."""
        shown = self._trials[trial].progress.shown
        return shown is not None and shown.rounds > 0

    def close(self) -> list[str]:
        """Release the claim to the trials, which have ended, and return a line on each failure of a tracker."""
        for trial, known in list(self._trials.items()):
            if known.ending is not None:  # its process died before its last round was sent
                self._finish(trial, known.ending[1])
            if known.outlived:
                with contextlib.suppress(OSError):  # files that stay are no more than that
                    self._checkpoints_of(trial).delete()
        if self._owner is not None:
            self._owner.release()
            self._owner = None
        return self._trackers.failures()

    def progress(self) -> list[Progress]:
        """Return the progress of all trials."""
        return self.changed_progress(0)[1]

    def changed_progress(self, since: int) -> tuple[int, list[Progress]]:
        """Return the progress of the trials that have changed after change number `since`, and the number to give next.

        A sweep of thousands of trials is asked twice a second.
        """
        changes = self._changes  # before the trials are looked at, since rounds may arrive meanwhile
        changed = []
        for known in list(self._trials.values()):
            if known.change > since:
                changed.append(known.progress.shown)
        return changes, [shown for shown in changed if shown is not None]

    def _changed(self, known: _Trial) -> None:
        self._changes += 1
        known.change = self._changes

    def _writer(self, trial: str) -> TrialWriter:
        writer = self._trials[trial].writer
        assert writer is not None, "the trial has begun"
        return writer

    def _write_rows(self, writer: TrialWriter) -> None:
        """Write the rounds of a trial that wait, whatever the budget says."""
        waiting = writer.waiting_bytes
        with self._budget.spending():
            writer.flush()
        self._waiting_bytes -= waiting

    def _checkpoints_of(self, trial: str) -> CheckpointStore:
        return CheckpointStore(self._home, trial, self._trials[trial].pinned)


def _write(known: _Trial) -> None:
    """Write the rounds of a trial that wait. An error belongs to this trial, and is raised with its next round."""
    assert known.writer is not None, "the trial runs"
    try:
        known.writer.flush()
        known.failure = None
    except Exception as error:  # of the disk, the object store or a damaged file
        known.failure = error


def _tuner_of(tuner_id: str) -> str:
    """Return what the ids of the trials of one `Tuner` have in common: Tune counts them behind a random prefix."""
    return tuner_id.partition("_")[0]
