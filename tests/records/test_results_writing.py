"""Rows on disk: never half, never twice, never lost, whatever moment a reader or a kill -9 picks."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from helpers.score_rows import row, trial_writer, write
from rayfed.core.errors import UsageError
from rayfed.records.tables import METRICS_SCHEMA, ROUNDS_SCHEMA
from rayfed.records.trials import record_trial
from rayfed.records.writer import ExperimentFiles, TrialWriter
from rayfed.reports.read import read

CLIENTS = 4
SPAWN = multiprocessing.get_context("spawn")


def one_round(writer: TrialWriter, number: int) -> None:
    rows = [row(number, client, "d", "test", "global", "accuracy", 0.5, 10) for client in range(CLIENTS)]
    write(writer, rows, bytes_down={"weights": 8, "c": 2})


def write_rounds(folder: Path, first: int, last: int, keep: int | None) -> None:
    """Segments of 40 rows, so that a test of seconds meets several."""
    with trial_writer(folder, keep_through_round=keep, segment_rows=40) as writer:
        for number in range(first, last + 1):
            one_round(writer, number)
            writer.flush()


def rounds_of(folder: Path) -> list[int]:
    metrics, rounds = (pd.read_parquet(folder / "e" / name) for name in ("metrics", "rounds"))
    assert not metrics.duplicated(["round", "client"]).any()
    assert list(metrics.groupby("round").size().unique()) == [CLIENTS]
    assert list(rounds["round"]) == sorted(metrics["round"].unique())
    return list(rounds["round"])


def test_a_reader_meets_no_error_and_no_row_twice_while_another_process_writes(tmp_path: Path) -> None:
    process = SPAWN.Process(target=write_rounds, args=(tmp_path, 1, 120, None))
    problems: list[str] = []
    reads = {"metrics": 0, "rounds": 0}

    def read_in_a_loop(name: str) -> None:
        seen = 0
        while process.exitcode is None:
            if not list((tmp_path / "e" / name).glob("*.parquet")):
                continue
            try:
                table = pd.read_parquet(tmp_path / "e" / name)
            except (OSError, ValueError) as error:  # what pyarrow raises for files that are gone or broken
                problems.append(repr(error))
                return
            if table.duplicated([key for key in ("round", "client") if key in table]).any():
                problems.append("a row twice")
            if len(table) < seen:
                problems.append(f"{len(table)} rows after {seen}")
            seen = len(table)
            reads[name] += 1

    process.start()
    readers = [threading.Thread(target=read_in_a_loop, args=(name,)) for name in reads]
    for reader in readers:
        reader.start()
    process.join()
    for reader in readers:
        reader.join()
    assert problems == []
    assert min(reads.values()) > 5
    assert rounds_of(tmp_path) == list(range(1, 121))


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.031])
def test_after_kill_9_a_resume_keeps_exactly_the_rounds_through_its_checkpoint(tmp_path: Path, delay: float) -> None:
    process = SPAWN.Process(target=write_rounds, args=(tmp_path, 1, 100_000, None))
    process.start()
    while len(list((tmp_path / "e" / "rounds").glob("*.parquet"))) < 1 or len(rounds_on_disk(tmp_path)) < 25:
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    write_rounds(tmp_path, 21, 30, keep=20)
    assert rounds_of(tmp_path) == list(range(1, 31))


def rounds_on_disk(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "e" / "rounds")


def test_an_attempt_that_keeps_nothing_begins_anew(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 30, keep=None)
    TrialWriter(ExperimentFiles(tmp_path, "e"), "t", "fedavg", 0)
    assert len(rounds_on_disk(tmp_path)) == 0


def test_trials_whose_names_begin_alike_do_not_touch_each_other(tmp_path: Path) -> None:
    for trial in ("t", "t-0000", "t=1"):
        with trial_writer(tmp_path, trial) as writer:
            one_round(writer, 1)
    TrialWriter(ExperimentFiles(tmp_path, "e"), "t", "fedavg", 0)
    table = rounds_on_disk(tmp_path)
    assert sorted(table["trial"]) == ["t-0000", "t=1"]
    assert list(table.columns) == ROUNDS_SCHEMA.names


def test_the_schemas_are_on_disk_as_declared_also_for_nulls(tmp_path: Path) -> None:
    write_rounds(tmp_path, 1, 1, keep=None)
    for name, schema in (("metrics", METRICS_SCHEMA), ("rounds", ROUNDS_SCHEMA)):
        assert pq.read_schema(tmp_path / "e" / name / "t-0000.parquet").equals(schema)
    first = rounds_on_disk(tmp_path).iloc[0]
    assert first["bytes_down"] == 10
    assert dict(first["bytes_down_by_field"]) == {"weights": 8, "c": 2}
    assert first["epsilon"] != first["epsilon"]  # null, as there was no privacy


def test_rows_stay_for_the_next_flush_when_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrialWriter(ExperimentFiles(tmp_path, "e"), "t", "fedavg", 0)
    one_round(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
    writer.flush()
    assert rounds_of(tmp_path) == [1]


@pytest.mark.parametrize("number", [b"0", None])
def test_results_with_another_schema_are_refused_and_stay(tmp_path: Path, number: bytes | None) -> None:
    record_trial(tmp_path, "e", "t", {"seed": 0})
    with trial_writer(tmp_path) as writer:
        one_round(writer, 1)
    for table in ("metrics", "rounds"):
        (file,) = (tmp_path / "e" / table).glob("*.parquet")
        whole, rows = file.read_bytes(), pq.read_table(file)
        pq.write_table(rows.replace_schema_metadata({"rayfed.schema": number} if number else None), file)
        content = file.read_bytes()
        refusal = rf"{file.name}: has schema {'0' if number else 'none'}, .* reads schema 2; give another folder, or"
        with pytest.raises(UsageError, match=refusal):
            read(tmp_path)
        with pytest.raises(UsageError, match=refusal):
            TrialWriter(ExperimentFiles(tmp_path, "e"), "t", "fedavg", 0)
        assert file.read_bytes() == content
        file.write_bytes(whole)
    (file,) = (tmp_path / "e" / "trials" / ".rows").iterdir()
    content = file.read_bytes().replace(b'"rayfed.schema": 2', b'"rayfed.schema": 0')
    file.write_bytes(content)
    for use in (lambda: read(tmp_path), lambda: record_trial(tmp_path, "e", "t", {})):
        with pytest.raises(UsageError, match=r"t\.json: has schema 0, .* reads schema 2; give another folder, or"):
            use()
    assert file.read_bytes() == content
