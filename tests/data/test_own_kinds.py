"""Columns and arrays of kinds that users bring: read as what they stand for, or refused in one line."""

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rayfed
from rayfed.core.errors import UsageError
from rayfed.data.sets.labelled_table import Table
from rayfed.data.sets.npz import Npz
from rayfed.data.user_clients import user_population

SIZE = 12
LABEL = np.arange(SIZE) % 2
X = np.arange(SIZE * 3, dtype=np.float32).reshape(SIZE, 3)
TIMES = np.datetime64("2024-01-01T00:00:00") + np.arange(SIZE)


class TestColumnsOfOneName:
    def read(self, path, **changes):
        return Table(**{"file": str(path), "features": ["a"], "label": "y"} | changes).load()

    @pytest.mark.parametrize("name", ["twice.csv", "twice.parquet"])
    def test_are_refused_where_they_are_used(self, tmp_path, name):
        columns = [pa.array([1.0, 2.0]), pa.array([3.0, 4.0]), pa.array([0, 1]), pa.array([5.0, 6.0])]
        table = pa.Table.from_arrays(columns, names=["a", "a", "y", "b"])
        if name.endswith(".csv"):
            (tmp_path / name).write_text("a,a,y,b\n1,3,0,5\n2,4,1,6\n")
        else:
            pq.write_table(table, tmp_path / name)
        with pytest.raises(UsageError, match=r"twice\.\w+: 2 columns are called 'a'; rename them, or drop all but one"):
            self.read(tmp_path / name)
        assert self.read(tmp_path / name, features=["b"]).images[:, 0].tolist() == [5, 6]


class TestNpz:
    def read(self, tmp_path, **changes):
        arrays = {"images": X, "labels": LABEL, "client": LABEL, "is_test": np.arange(SIZE) % 4 == 0}
        np.savez(tmp_path / "own.npz", **{**arrays, **changes})
        return Npz(file=str(tmp_path / "own.npz")).load()

    @pytest.mark.parametrize(
        ("labels", "expected"),
        [
            (np.array(["ok", "ill"])[LABEL], (1 - LABEL).tolist()),  # in alphabetical order
            (np.array([b"ok", b"ill"])[LABEL], (1 - LABEL).tolist()),
            (LABEL[:, None], LABEL.tolist()),
            (LABEL[:, None].astype(np.uint8), LABEL.tolist()),
            (LABEL.astype(bool), LABEL.tolist()),
            (LABEL.astype(np.float16), LABEL.tolist()),
            (LABEL.astype(">i4"), LABEL.tolist()),
        ],
    )
    def test_labels(self, tmp_path, labels, expected):
        dataset = self.read(tmp_path, labels=labels)
        assert (dataset.labels.tolist(), dataset.num_classes) == (expected, 2)

    def test_clients_may_have_names(self, tmp_path):
        dataset = self.read(tmp_path, client=np.array(["south", "north"])[LABEL])
        assert dataset.client.tolist() == (1 - LABEL).tolist()
        assert self.read(tmp_path, client=LABEL.astype(float)).client.tolist() == LABEL.tolist()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"labels": TIMES}, r"labels: are datetime64\[s\] \[12\]; expected numbers, or one word for each row"),
            ({"labels": LABEL + 0j}, r"labels: are complex128 \[12\]"),
            ({"labels": np.where(LABEL, np.inf, 0)}, r"labels: label inf; a class is an integer from 0, which 6 of 12"),
            ({"labels": np.array(["a", "a "])[LABEL]}, r"labels has 'a' and 'a ', which differ only in spaces"),
            ({"client": LABEL + 0.5}, r"client: is float64 \[12\]; expected integers or words \[n\]"),
            ({"client": np.where(LABEL, np.inf, 0)}, r"client: is float64 \[12\]"),
            ({"client": LABEL[:, None]}, r"client: is int64 \[12, 1\]"),
            ({"client": TIMES}, r"client: is datetime64"),
            ({"is_test": LABEL.astype(str)}, r"is_test is <U\d+ \[12\]; expected booleans \[N\]"),
            ({"images": TIMES}, r"images has the type datetime64"),
        ],
    )
    def test_what_stands_for_nothing_is_refused(self, tmp_path, changes, words):
        with pytest.raises(UsageError, match=words):
            self.read(tmp_path, **changes)


def population(y, *, classes=True, x=X, **others):
    part = x, y
    return user_population([{"train": part, "test": part}], classes=classes, **others)


class TestClients:
    @pytest.mark.parametrize(
        "y",
        [
            pd.Series(LABEL, dtype="Int64"),
            pd.Series(LABEL.astype(bool), dtype="boolean"),
            pd.Series(LABEL).astype("category"),
            LABEL.astype(object),
            pa.array(LABEL),
            torch.from_numpy(LABEL).half(),
            [torch.tensor(value) for value in LABEL.tolist()],
            LABEL.astype(str),
        ],
        ids=lambda y: f"{type(y).__name__} {getattr(y, 'dtype', '')}",
    )
    def test_labels(self, y):
        assert population(y).clients[0].train.y.tolist() == LABEL.tolist()

    @pytest.mark.parametrize("classes", [True, False])
    @pytest.mark.parametrize(
        ("y", "words"),
        [
            (TIMES, r"labels are datetime64\[s\]; give numbers, such as the seconds of times"),
            (pd.Series(pd.date_range("2024", periods=SIZE)), r"labels are datetime64"),
            (np.arange(SIZE).astype("m8[s]"), r"labels are timedelta64\[s\]"),
            (LABEL + 1j, r"labels are complex128"),
            (torch.from_numpy(LABEL) + 0j, r"labels are complex64"),
            ([datetime.date(2024, 1, 1)] * SIZE, r"labels are not numbers"),
            (["ill"] * SIZE, r"labels are not numbers .*; number the classes of all clients from 0"),
        ],
    )
    def test_labels_that_are_no_numbers(self, y, words, classes):
        with pytest.raises(UsageError, match=rf"clients\[0\].train: {words}"):
            population(y, classes=classes)

    def test_infinite_labels_are_no_classes(self):
        with pytest.raises(
            UsageError, match=r"clients\[0\].train: label inf; a class is an integer from 0, which 6 of 12"
        ):
            population(np.where(LABEL, np.inf, 0))

    @pytest.mark.parametrize(
        ("count", "words"),
        [
            (0, "num_classes=0: must be at least 1"),
            ("2", "num_classes='2': expected an integer, got str"),
            (2.5, "num_classes=2.5: expected an integer, got float"),
            (True, "num_classes=True: expected an integer, got bool"),
            (10**9, "num_classes=1000000000: must be at most 1000000"),
        ],
    )
    def test_the_number_of_classes(self, count, words):
        with pytest.raises(UsageError) as caught:
            population(LABEL, num_classes=count)
        assert str(caught.value).startswith(words)
        assert population(LABEL, num_classes=4.0).num_classes == 4

    @pytest.mark.parametrize("make", [3, lambda a, b: {}, lambda *, number: {}])
    def test_what_cannot_make_a_client(self, make):
        with pytest.raises(UsageError, match=r"clients\.make: expected a function of the number of a client; "):
            user_population(rayfed.Clients({"train": [1], "test": [1]}, make), 2)
