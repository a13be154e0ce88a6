"""The trials table: different algorithms in one file, one type a column, many processes at once."""

import datetime
import multiprocessing
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from rayfed.core.errors import StorageError
from rayfed.records.trials import claimed, mark_interrupted, merge_trials, record_trial
from rayfed.reports.read import read

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
SPAWN = multiprocessing.get_context("spawn")


def trials(folder: Path) -> pd.DataFrame:
    merge_trials(folder, "e")
    return pd.read_parquet(folder / "e" / "trials").set_index("trial")


def test_different_algorithms_share_one_table_and_updates_keep_the_rest(tmp_path: Path) -> None:
    record_trial(tmp_path, "e", "a", {"algorithm": {"name": "fedprox", "mu": 1}, "seed": 3, "local.lr": 0.1})
    record_trial(tmp_path, "e", "b", {"algorithm": {"name": "dbe", "kappa": 50}, "seed": 4, "started": EPOCH})
    record_trial(tmp_path, "e", "a", {"status": "done", "rounds_done": 7, "seconds": 1.5})
    table = trials(tmp_path)
    assert list(table["algorithm"]) == ["dbe", "fedprox"]  # the one that began first
    assert list(table["status"]) == ["running", "done"]
    assert table.loc["a", "algorithm.mu"] == 1
    assert pd.isna(table.loc["b", "algorithm.mu"])
    assert table.loc["b", "algorithm.kappa"] == 50
    assert table.loc["a", "rounds_done"] == 7
    assert table.loc["b", "started"] == EPOCH
    assert table.loc["a", "version_numpy"]
    assert {path.name for path in (tmp_path / "e" / "trials").glob("[!.]*")} == {"trials.parquet"}


def test_each_column_has_one_type(tmp_path: Path) -> None:
    one = {"int": 1, "number": 1, "flag": True, "mixed": 1, "list": [1, 2], "text": "x", "null": None, "big": 2**70}
    two = {"int": 2, "number": 0.5, "flag": None, "mixed": "auto", "list": None, "text": None, "null": None, "big": 1}
    record_trial(tmp_path, "e", "a", one)
    record_trial(tmp_path, "e", "b", two)
    record_trial(tmp_path, "e", "b", {})
    merge_trials(tmp_path, "e")
    table = pq.read_table(tmp_path / "e" / "trials").to_pydict()
    assert table["int"] == [1, 2]
    assert table["number"] == [1.0, 0.5]
    assert table["flag"] == [True, None]
    assert table["mixed"] == ["1", "auto"]
    assert table["list"] == ["[1, 2]", None]
    assert table["null"] == [None, None]
    assert table["big"] == [str(2**70), "1"]


def record_ten(folder: Path, name: str) -> None:
    for number in range(10):
        record_trial(folder, "e", f"{name}{number}", {f"algorithm.{name}": number, "seed": number})


def test_no_row_is_lost_between_processes(tmp_path: Path) -> None:
    processes = [SPAWN.Process(target=record_ten, args=(tmp_path, name)) for name in "abc"]
    for process in processes:
        process.start()
    while any(process.exitcode is None for process in processes):
        if (tmp_path / "e" / "trials" / "trials.parquet").exists():
            read(tmp_path)
            pd.read_parquet(tmp_path / "e" / "trials")
        for process in processes:
            process.join(0.01)
    table = trials(tmp_path)
    assert sorted(table.index) == sorted(f"{name}{number}" for name in "abc" for number in range(10))
    assert table.loc["b7", "algorithm.b"] == 7


def test_a_row_is_there_at_once_for_readers_and_for_pandas_when_the_command_ends(tmp_path: Path) -> None:
    names = [f"a{seed}" for seed in range(5)]
    with claimed(tmp_path, "e", ["a"]):
        for seed, name in enumerate(names):
            record_trial(tmp_path, "e", name, {"seed": seed, "status": "running" if seed else "done"})
            assert sorted(read(tmp_path).trials["seed"]) == list(range(seed + 1))
    assert sorted(pd.read_parquet(tmp_path / "e" / "trials")["seed"]) == list(range(5))
    assert mark_interrupted(tmp_path, "e", [*names, ""]) == 1
    assert list(pd.read_parquet(tmp_path / "e" / "trials")["status"]) == ["done", *["interrupted"] * 4]


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    record_trial(tmp_path, "e", "a", {})
    (tmp_path / "e" / "trials" / ".rows" / "a.json").write_text('{"trial":')
    for use in (lambda: read(tmp_path), lambda: record_trial(tmp_path, "e", "a", {})):
        with pytest.raises(StorageError, match=r"a\.json: damaged, .*; restore it, or delete it"):
            use()


def test_read_gives_empty_tables_with_columns_and_joins_experiments(tmp_path: Path) -> None:
    record_trial(tmp_path, "one", "a", {"algorithm.mu": 1, "seed": 0})
    record_trial(tmp_path, "two", "b", {"algorithm.mu": "auto", "seed": 0})
    tables = read(tmp_path)
    assert list(tables.trials["experiment"]) == ["one", "two"]
    assert list(tables.trials["seed"]) == [0, 0]
    assert list(tables.metrics.columns[-3:]) == ["n", "unseen", "higher_is_better"]
    assert "bytes_down_by_field" in tables.rounds
    assert list(read(tmp_path, "two").trials["trial"]) == ["b"]
