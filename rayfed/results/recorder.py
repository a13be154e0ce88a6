"""The recorder, which keeps what trials produce: Parquet tables, checkpoints, and the progress of each trial.

One recorder serves many trials. Without Ray it is called directly; with Ray it is an actor on the node where the
command runs, so that all results arrive there, whichever node a trial runs on.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfed.core.records import Record
from rayfed.results.checkpoints import CheckpointStore, Part
from rayfed.results.maps import write_map
from rayfed.results.storage import open_storage, storage_errors
from rayfed.results.trials import record_trial
from rayfed.results.writer import TrialWriter


@dataclass
class Progress:
    """The progress of a trial.

    `val` and `test` are the last accuracies at `default_eval_point` (means over clients), or None.
    """

    trial: str
    rounds: int
    status: str = "running"
    round: int = 0
    first_round: int = 0
    clients: int = 0
    seconds: float = 0.0
    val: float | None = None
    test: float | None = None
    best_val: float | None = None
    error: str | None = None


class Recorder:
    """Writes the results of trials to `<folder>/<experiment>/`.

    All methods raise `StorageError` if the disk or the object store fails.

    Args:
        folder: A path or URL; see `rayfed.results.storage.open_storage`.
    """

    def __init__(self, folder: str, experiment: str):
        self.folder, self.experiment = folder, experiment
        self._home = open_storage(folder).child(experiment)
        self._checkpoints: dict[str, CheckpointStore] = {}
        self._writers: dict[str, TrialWriter] = {}
        self._progress: dict[str, Progress] = {}
        self._began: dict[str, float] = {}
        self._points: dict[str, str] = {}  # by trial, the point of `Progress.val`

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, keep_through_round: int | None) -> None:
        """Start a trial, or continue it after `keep_through_round`.

        Args:
            values: the trial's columns in `trials`.
            rounds: the number of rounds that it is going to have.
        """
        name, seed = str(values["algorithm"]["name"]), int(values["seed"])
        with storage_errors(self._home.location):
            if keep_through_round is None:  # a resume must not use the checkpoint of an earlier attempt
                self._checkpoints_of(trial).delete()
            record_trial(self.folder, self.experiment, trial, {**values, "status": "running", "error": None})
            self._writers[trial] = TrialWriter(
                self.folder, self.experiment, trial, name, seed, keep_through_round=keep_through_round
            )
        done = keep_through_round or 0
        self._progress[trial] = Progress(trial, rounds, round=done, first_round=done)
        self._began[trial] = time.monotonic()
        self._points[trial] = str(values["default_eval_point"])

    def record(self, trial: str, record: Record) -> None:
        """Record a finished round."""
        writer = self._writers[trial]
        writer.add_scores(record.round, record.scores)
        writer.add_round(record)
        with storage_errors(self._home.location):
            writer.flush()
            for map in record.maps:
                write_map(self._home.child("maps"), trial, record.round, map)
        progress = self._progress[trial]
        progress.round = record.round
        progress.clients += record.cohort
        progress.seconds = time.monotonic() - self._began[trial]
        accuracy = record.accuracy(self._points[trial])
        progress.val = accuracy.get("val", progress.val)
        progress.test = accuracy.get("test", progress.test)
        if progress.val is not None:
            progress.best_val = max(progress.val, progress.best_val or 0.0)

    def begin_checkpoint(self, trial: str, base: int | None) -> int:
        """Begin a checkpoint, after everything that was recorded before is on disk, and return its number.

        Args:
            base: the number of the checkpoint whose parts stay valid unless they are written anew; None: all are.
        """
        with storage_errors(self._home.location):
            if trial in self._writers:
                self._writers[trial].flush(force=True)
            return self._checkpoints_of(trial).begin(base)

    def append_to_checkpoint(self, trial: str, block: bytes) -> None:
        """Append a block of bytes to the checkpoint that was begun."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).append(block)

    def commit_checkpoint(
        self, trial: str, header: Mapping[str, Any], server: Part, clients: Mapping[str, Part], size: int
    ) -> None:
        """Finish the checkpoint that was begun; see `CheckpointStore.commit`."""
        with storage_errors(self._home.location):
            self._checkpoints_of(trial).commit(header, server, clients, size)

    def discard_checkpoint(self, trial: str) -> None:
        """Remove the checkpoint that was begun, if there is one."""
        self._checkpoints_of(trial).discard()

    def saved(self, trial: str) -> list[dict[str, Any]]:
        """Return the trial's checkpoints, newest first; see `CheckpointStore.saved`."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).saved()

    def saved_bytes(self, trial: str, segment: int, offset: int, length: int) -> bytes:
        """Return bytes of a segment of the trial's checkpoints; fewer than `length` if it was cut off."""
        with storage_errors(self._home.location):
            return self._checkpoints_of(trial).read(segment, offset, length)

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        """End a trial; `values` has its status and other columns of `trials`."""
        progress = self._progress.setdefault(trial, Progress(trial, 0))
        progress.status, progress.error = str(values["status"]), values.get("error")
        measured = {"seconds": progress.seconds, "rounds_done": progress.round} if trial in self._began else {}
        with storage_errors(self._home.location):
            try:
                if trial in self._writers:
                    self._writers.pop(trial).close()
            finally:  # rows may be lost to a full disk, which the row of the trial should tell
                record_trial(self.folder, self.experiment, trial, {**measured, **values})

    def progress(self) -> list[Progress]:
        """Return the progress of all trials."""
        return list(self._progress.values())

    def _checkpoints_of(self, trial: str) -> CheckpointStore:
        if trial not in self._checkpoints:
            self._checkpoints[trial] = CheckpointStore(self._home, trial)
        return self._checkpoints[trial]
