"""Writes one trial's rows of `metrics` and `rounds` while it runs, so that others can read them at any moment."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from rayfed.results.files import check_name
from rayfed.results.segments import SEGMENT_ROWS, Segments
from rayfed.results.tables import (
    METRICS_SCHEMA,
    ROUNDS_SCHEMA,
    MetricRow,
    RoundRow,
    TrialId,
    metrics_table,
    rounds_table,
)

WRITING_SHARE = 0.02
"""The share of the elapsed time that writing may take before `flush` starts to skip."""


class TrialWriter:
    """Collects a trial's rows and puts them under `<folder>/<experiment>/metrics` and `.../rounds`.

    One process writes a trial. Rows that the trial left there in an earlier attempt are kept up to and including
    `keep_through_round` and dropped after it; None begins anew and drops them all. `last_round` is the last round kept
    in `rounds` (None: none); where it is less than `keep_through_round`, rows were lost before the checkpoint.

    Raises:
        UsageError: a name of the experiment or the trial that cannot be a file's name.
    """

    def __init__(
        self,
        folder: str | Path,
        experiment: str,
        trial: str,
        algorithm: str,
        seed: int,
        *,
        keep_through_round: int | None = None,
        segment_rows: int = SEGMENT_ROWS,
    ):
        self._id = TrialId(check_name(experiment, "experiment"), check_name(trial, "trial"), algorithm, seed)
        home = Path(folder) / experiment
        self._segments = {
            name: Segments(home / name, trial, schema, keep_through_round=keep_through_round, segment_rows=segment_rows)
            for name, schema in (("metrics", METRICS_SCHEMA), ("rounds", ROUNDS_SCHEMA))
        }
        self.last_round = self._segments["rounds"].last_round
        self._metrics: list[MetricRow] = []
        self._rounds: list[RoundRow] = []
        self._began = time.monotonic()
        self._spent = 0.0

    def add_metrics(self, rows: Iterable[MetricRow]) -> None:
        """Takes values; they are on disk after the next `flush` that does not skip."""
        self._metrics.extend(rows)

    def add_round(self, row: RoundRow) -> None:
        """Takes the row of one round; it is on disk after the next `flush` that does not skip."""
        self._rounds.append(row)

    def flush(self, *, force: bool = False) -> None:
        """Puts what was added on disk; skips when writing has taken more than `WRITING_SHARE` of the time so far.

        Force it before a checkpoint is written: a resume can keep only rounds that are on disk.

        Raises:
            ValueError: a row with an unknown split, point or stage.
            OSError: the disk is full or gone; the rows stay in memory for the next call.
        """
        began = time.monotonic()
        if not force and self._spent > WRITING_SHARE * (began - self._began):
            return
        if self._metrics:  # before the rounds, so that a round in `rounds` has its values in `metrics`
            self._segments["metrics"].append(metrics_table(self._id, self._metrics))
            self._metrics = []
        if self._rounds:
            self._segments["rounds"].append(rounds_table(self._id, self._rounds))
            self._rounds = []
        self._spent += time.monotonic() - began

    def close(self) -> None:
        """Puts everything on disk. The writer can be used on, and closed again."""
        self.flush(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
