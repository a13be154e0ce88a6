"""The recorder, which keeps what trials produce: Parquet tables, checkpoints, and the progress of each trial.

One recorder serves many trials. Without Ray it is called directly; with Ray it is an actor on the node where the
command runs, so that all results arrive there, whichever node a trial runs on.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfed.core.records import Record
from rayfed.results.maps import write_map
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
    """Writes the results of trials to `<folder>/<experiment>/`."""

    def __init__(self, folder: str, experiment: str):
        self.folder, self.experiment = folder, experiment
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
        if keep_through_round is None:  # a resume must not use the checkpoint of an earlier attempt
            checkpoint_path(self.folder, self.experiment, trial).unlink(missing_ok=True)
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
        writer.flush()
        for map in record.maps:
            write_map(Path(self.folder) / self.experiment / "maps", trial, record.round, map)
        progress = self._progress[trial]
        progress.round = record.round
        progress.clients += record.cohort
        progress.seconds = time.monotonic() - self._began[trial]
        accuracy = record.accuracy(self._points[trial])
        progress.val = accuracy.get("val", progress.val)
        progress.test = accuracy.get("test", progress.test)
        if progress.val is not None:
            progress.best_val = max(progress.val, progress.best_val or 0.0)

    def checkpoint(self, trial: str, content: bytes) -> None:
        """Write a checkpoint to disk, after everything that was recorded before it."""
        self._writers[trial].flush(force=True)
        path = checkpoint_path(self.folder, self.experiment, trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(content)
        os.replace(unfinished, path)

    def saved(self, trial: str) -> bytes | None:
        """Return the trial's last checkpoint, or None."""
        path = checkpoint_path(self.folder, self.experiment, trial)
        return path.read_bytes() if path.exists() else None

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        """End a trial; `values` has its status and other columns of `trials`."""
        if trial in self._writers:
            self._writers.pop(trial).close()
        progress = self._progress.setdefault(trial, Progress(trial, 0))
        progress.status, progress.error = str(values["status"]), values.get("error")
        measured = {"seconds": progress.seconds, "rounds_done": progress.round} if trial in self._began else {}
        record_trial(self.folder, self.experiment, trial, {**measured, **values})

    def progress(self) -> list[Progress]:
        """Return the progress of all trials."""
        return list(self._progress.values())


def checkpoint_path(folder: str | Path, experiment: str, trial: str) -> Path:
    """Return the path of a trial's checkpoint."""
    return Path(folder) / experiment / "checkpoints" / f"{trial}.pt"
