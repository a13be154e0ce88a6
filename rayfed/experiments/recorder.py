"""Keeps what trials produce: Parquet tables, checkpoints, and how far each trial is. One recorder serves many trials.

In a simulation without Ray it is called directly; otherwise it is an actor on the node where the command runs, so that
all results arrive there, whichever node a trial runs on.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfed.engine.server import Record
from rayfed.results.maps import write_map
from rayfed.results.tables import MetricRow, RoundRow
from rayfed.results.trials import record_trial
from rayfed.results.writer import TrialWriter


@dataclass
class Progress:
    """How far a trial is. `val` is the last validation accuracy at the scored point (mean over clients), or None."""

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
    """Writes under `<folder>/<experiment>/`."""

    def __init__(self, folder: str, experiment: str):
        self.folder, self.experiment = folder, experiment
        self._writers: dict[str, TrialWriter] = {}
        self._progress: dict[str, Progress] = {}
        self._began: dict[str, float] = {}
        self._scored: dict[str, str] = {}

    def begin(self, trial: str, values: Mapping[str, Any], rounds: int, keep_through_round: int | None) -> None:
        """A trial starts, or goes on after `keep_through_round`."""
        name, seed = str(values["algorithm"]["name"]), int(values["seed"])
        if keep_through_round is None:  # what an earlier attempt saved is not of this one, so no resume may take it
            checkpoint_path(self.folder, self.experiment, trial).unlink(missing_ok=True)
        record_trial(self.folder, self.experiment, trial, {**values, "status": "running", "error": None})
        self._writers[trial] = TrialWriter(
            self.folder, self.experiment, trial, name, seed, keep_through_round=keep_through_round
        )
        done = keep_through_round or 0
        self._progress[trial] = Progress(trial, rounds, round=done, first_round=done)
        self._began[trial] = time.monotonic()
        self._scored[trial] = str(values["default_eval_point"])

    def record(self, trial: str, record: Record) -> None:
        """A round is over."""
        writer = self._writers[trial]
        seconds = {f"seconds_{part}": value for part, value in record.seconds.items()}
        writer.add_metrics(MetricRow(record.round, *score) for score in record.scores)
        writer.add_round(
            RoundRow(
                round=record.round,
                stage=record.stage,
                bytes_down_by_field=record.bytes_down,
                bytes_up_by_field=record.bytes_up,
                bytes_formula=record.bytes_formula,
                cohort=record.cohort,
                epsilon=record.epsilon,
                privacy_unit=record.privacy_unit,
                **seconds,
            )
        )
        writer.flush()
        for found in record.maps:
            write_map(Path(self.folder) / self.experiment / "maps", trial, record.round, found)
        progress = self._progress[trial]
        progress.round = record.round
        progress.clients += record.cohort
        progress.seconds = time.monotonic() - self._began[trial]
        accuracy = record.accuracy(self._scored[trial])
        progress.val = accuracy.get("val", progress.val)
        progress.test = accuracy.get("test", progress.test)
        if progress.val is not None:
            progress.best_val = max(progress.val, progress.best_val or 0.0)

    def checkpoint(self, trial: str, content: bytes) -> None:
        """Puts a checkpoint on disk, after everything that was recorded before it."""
        self._writers[trial].flush(force=True)
        path = checkpoint_path(self.folder, self.experiment, trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_bytes(content)
        os.replace(part, path)

    def saved(self, trial: str) -> bytes | None:
        """The trial's last checkpoint, if there is one."""
        path = checkpoint_path(self.folder, self.experiment, trial)
        return path.read_bytes() if path.exists() else None

    def end(self, trial: str, values: Mapping[str, Any]) -> None:
        """A trial is over; `values` has its status and what is known of its end."""
        if trial in self._writers:
            self._writers.pop(trial).close()
        progress = self._progress.setdefault(trial, Progress(trial, 0))
        progress.status, progress.error = str(values["status"]), values.get("error")
        own = {"seconds": progress.seconds, "rounds_done": progress.round} if trial in self._began else {}
        record_trial(self.folder, self.experiment, trial, {**own, **values})

    def progress(self) -> list[Progress]:
        return list(self._progress.values())


def checkpoint_path(folder: str | Path, experiment: str, trial: str) -> Path:
    return Path(folder) / experiment / "checkpoints" / f"{trial}.pt"
