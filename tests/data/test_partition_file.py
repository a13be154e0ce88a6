"""A partition read from Parquet: rows named by their origin, and one line for every way in which it can be wrong."""

import numpy as np
import pandas
import pytest

from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.partitions.file import File

SIZE = 12  # eight rows of source "train", then four of "t10k"


def dataset(**changes):
    origin = {"source": np.repeat([0, 1], [8, 4]).astype(np.int8), "index": np.r_[:8, :4]}
    return Dataset.of(
        "toy", np.zeros((SIZE, 1), np.float32), np.arange(SIZE) % 3, sources=("train", "t10k"), **{**origin, **changes}
    )


def table(**changes):
    """Clients 4 and 9; the rows of the file run backwards through the dataset."""
    columns = {
        "client": [4] * 6 + [9] * 6,
        "split": (["train"] * 4 + ["test"] * 2) * 2,
        "source": ["t10k"] * 4 + ["train"] * 8,
        "index": [3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1, 0],
    }
    return pandas.DataFrame({**columns, **changes})


@pytest.fixture
def write(tmp_path):
    def write(frame):
        path = tmp_path / "split.parquet"
        frame.to_parquet(path)
        return str(path)

    return write


def test_rows_are_found_by_their_origin(write):
    first, second = File(file=write(table()), validation=0.25).split(dataset())
    assert (first.id, second.id) == (0, 1)
    assert sorted([*first.train, *first.val]) == [8, 9, 10, 11]
    assert sorted(first.test) == [6, 7]
    assert sorted([*second.train, *second.val]) == [2, 3, 4, 5]
    assert sorted(second.test) == [0, 1]
    assert len(first.val) == len(second.val) == 1


def test_validation_rows_of_the_file_are_taken_as_they_are(write):
    splits = ["train", "train", "val", "val", "test", "test"] * 2
    first, _ = File(file=write(table(split=splits)), validation=0.5).split(dataset())
    assert [list(rows) for rows in first[2:]] == [[11, 10], [9, 8], [7, 6]]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"index": [4, *range(2, -1, -1), *range(7, -1, -1)]}, ["index 4 of source 't10k'", "of train, t10k that"]),
        ({"source": ["tenk"] * 12}, ["source 'tenk'", "of train, t10k that clients of toy may hold"]),
        ({"source": [1] * 12}, ["column 'source' is int64; expected text"]),
        ({"client": ["a"] * 12}, ["column 'client' is string; expected integers from 0"]),
        ({"split": [b"\xff"] * 12}, ["column 'split' is binary; expected text"]),
        ({"split": ["holdout"] * 12}, ["column 'split' has 'holdout'", "train, val or test"]),
        ({"index": [0.5] * 12}, ["column 'index' is double", "integers"]),
        ({"client": [-1] + [4] * 5 + [9] * 6}, ["column 'client' is int64 from -1", "integers from 0"]),
        ({"client": [None] + [1.0] * 11}, ["column 'client' is double, with 1 empty cells", "no empty cells"]),
    ],
)
def test_a_wrong_table_is_one_line(write, changes, facts):
    path = write(table(**changes))
    with pytest.raises(UsageError) as caught:
        File(file=path).split(dataset())
    message = str(caught.value)
    assert message.startswith(f"partition.file={path}: ")
    for fact in facts:
        assert fact in message


def test_wrong_files(write, tmp_path):
    with pytest.raises(UsageError, match=r"has no rows; expected one for each example"):
        File(file=write(table()[:0])).split(dataset())
    with pytest.raises(UsageError, match=r"no column 'source'; it has client, split, index"):
        File(file=write(table().drop(columns="source"))).split(dataset())
    text = tmp_path / "text.parquet"
    text.write_text("client,split,source,index\n")
    with pytest.raises(UsageError, match=r"text.parquet: .*truncated, damaged or not a Parquet file \("):
        File(file=str(text)).split(dataset())
    with pytest.raises(UsageError, match=r"none.parquet: no such file; expected a Parquet file of client, split"):
        File(file=str(tmp_path / "none.parquet")).split(dataset())


def test_a_row_of_a_domain_that_nobody_may_hold(write):
    two = dataset(domain=(np.arange(SIZE) >= 8).astype(np.int16), domains=("a", "b"), ood=("b",))
    with pytest.raises(UsageError, match=r"index 3 of source 't10k' is not among the 8 .* may hold"):
        File(file=write(table())).split(two)
