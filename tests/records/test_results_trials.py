"""The trials table: different algorithms in one file, one type a column, many processes at once."""

import datetime
import json
import multiprocessing
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

import rayfed
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


def test_a_damaged_row_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    for name in "ab":
        record_trial(tmp_path, "e", name, {"seed": 3})
    file = tmp_path / "e" / "trials" / ".rows" / "a.json"
    file.write_text('{"trial":')
    tables = read(tmp_path)
    assert tables.trials["trial"].tolist() == ["b"]
    ((experiment, line),) = tables.faults
    assert experiment == "e"
    assert line.startswith(f"{file}: damaged, not the row that rayfed wrote (")
    assert line.endswith("restore it, or delete it and run its trial again")
    with pytest.raises(StorageError, match=r"a\.json: damaged, .*; restore it, or delete it"):
        record_trial(tmp_path, "e", "a", {})
    assert list(trials(tmp_path).index) == ["b"]
    with claimed(tmp_path, "e", ["c"]):
        record_trial(tmp_path, "e", "c", {})
    assert rayfed.report(tmp_path).count(f"Left out: {line}.".split()[-1]) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": "7"}, "seed is '7'"),
        ({"seed": True}, "seed is True"),
        ({"rounds_done": 1.5}, "rounds_done is 1.5"),
        ({"rounds": "many"}, "rounds is 'many'"),
        ({"rounds": None, "stop_reason": "x"}, "it has no rounds"),
        ({"seconds": "long"}, "seconds is 'long'"),
        ({"error": ["a"]}, "error is ['a']"),
        ({"status": "finished"}, "status is 'finished'"),
        ({"status": None}, "it has no status"),
        ({"default_eval_point": "there"}, "default_eval_point is 'there'"),
        ({"selection_mode": 1}, "selection_mode is 1"),
        ({"owner": "host 1 2026-01-01T00:00:00 ../../x"}, "owner is 'host 1 2026-01-01T00:00:00 ../../x'"),
        ({"owner": "host 1 2026-01-01T00:00:00 /tmp/deadbeef"}, "owner is 'host 1 2026-01-01T00:00:00 /tmp/deadbeef'"),
        ({"owner": "deadbeef"}, "owner is 'deadbeef'"),
        ({"trial": "b"}, "it is the row of 'b'"),
        ({"experiment": "../e"}, "experiment='../e': use a name"),
        ({"experiment": None}, "experiment='': use a name"),
        ({"partition_hash": "../../x"}, "name='../../x': use a name"),
        ({"started": None}, "fromisoformat"),
        ({"started": "2026-01-01T00:00:00"}, "without a time zone"),
        ({"started": "0001-01-01T00:00:00+00:00"}, "started is '0001-01-01T00:00:00+00:00'"),
        ({"name": "\ud800"}, "surrogates not allowed"),
    ],
    ids=str,
)
def test_the_fields_of_a_row_have_the_types_of_their_columns(tmp_path: Path, change: dict, why: str) -> None:
    for name in "ab":
        record_trial(tmp_path, "e", name, {"seed": 3, "rounds": 5, "rounds_done": 5})
    file = tmp_path / "e" / "trials" / ".rows" / "a.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    tables = read(tmp_path)
    assert tables.trials["trial"].tolist() == ["b"]
    ((_, line),) = tables.faults
    assert why in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "content", ["", "7", "[]", '"x"', "[" * 100_000, "{" + '"a":{' * 50_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_row_is_named(tmp_path: Path, content: str) -> None:
    record_trial(tmp_path, "e", "a", {})
    (tmp_path / "e" / "trials" / ".rows" / "a.json").write_text(content)
    ((_, line),) = read(tmp_path).faults
    assert "a.json: damaged, not the row that rayfed wrote (" in line


def test_large_integers_beside_fractions_are_text(tmp_path: Path) -> None:
    for name, value in {"a": 10**400, "b": 0.5}.items():
        record_trial(tmp_path, "e", name, {"number": value})
    assert sorted(trials(tmp_path)["number"]) == ["0.5", str(10**400)]


def test_read_gives_empty_tables_with_columns_and_joins_experiments(tmp_path: Path) -> None:
    record_trial(tmp_path, "one", "a", {"algorithm.mu": 1, "seed": 0})
    record_trial(tmp_path, "two", "b", {"algorithm.mu": "auto", "seed": 0})
    tables = read(tmp_path)
    assert list(tables.trials["experiment"]) == ["one", "two"]
    assert list(tables.trials["seed"]) == [0, 0]
    assert list(tables.metrics.columns[-3:]) == ["n", "unseen", "higher_is_better"]
    assert "bytes_down_by_field" in tables.rounds
    assert list(read(tmp_path, "two").trials["trial"]) == ["b"]
