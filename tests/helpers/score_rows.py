"""Rows of the table `metrics`, written by hand."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from rayfed.core.round_record import Record, Score, lower_is_better_by_name
from rayfed.records.round_report import RoundReport
from rayfed.records.trials import record_trial
from rayfed.records.writer import SEGMENT_ROWS, ExperimentFiles, TrialWriter


class Row(NamedTuple):
    """A score and its round."""

    round: int
    score: Score

    def with_(self, **changes: Any) -> "Row":
        return Row(self.round, replace(self.score, **changes))


def row(
    round: int, client: int, domain: str, split: str, point: str, metric: str, value: float, n: int, **others: Any
) -> Row:
    others = {"higher_is_better": not lower_is_better_by_name(metric), **others}
    score = Score(client=client, domain=domain, split=split, point=point, metric=metric, value=value, n=n, **others)
    return Row(round, score)


def write(writer: TrialWriter, rows: Iterable[Row], **of_round: Any) -> None:
    """Add the rounds of `rows`; `of_round` are further attributes of their records."""
    by_round: dict[int, list[Score]] = {}
    for number, score in rows:
        by_round.setdefault(number, []).append(score)
    for number, scores in by_round.items():
        record = Record(**{"stage": "round", "round": number, "cohort": 2, "scores": scores, **of_round})
        writer.add(RoundReport.of(record))


def add_rows(
    folder: Path, name: str, rows: Iterable[Row], *, algorithm: str = "fedavg", seed: int = 0, **values: Any
) -> None:
    """Add a trial with the scores `rows` to the experiment e; in keys of `values`, `__` stands for a dot."""
    of_trial = {key.replace("__", "."): value for key, value in values.items()}
    record_trial(folder, "e", name, {"algorithm": algorithm, "seed": seed, "status": "done", **of_trial})
    with trial_writer(folder, name, algorithm=algorithm, seed=seed) as writer:
        write(writer, rows)


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the rows as `read` does, for one trial."""
    table = pd.DataFrame([{"round": number, **asdict(score)} for number, score in rows])
    return table.assign(experiment="e", trial="t")


@contextmanager
def trial_writer(
    folder: Path,
    name: str = "t",
    *,
    experiment: str = "e",
    algorithm: str = "fedavg",
    seed: int = 0,
    segment_rows: int = SEGMENT_ROWS,
    **options: Any,
) -> Iterator[TrialWriter]:
    """Yield a trial's writer, which has written all rows when the block ends."""
    files = ExperimentFiles(folder, experiment, segment_rows=segment_rows)
    writer = TrialWriter(files, name, algorithm, seed, **options)
    yield writer
    writer.flush()
