"""Numbers that become equal, or are rounded, when they become float32: refused or noted, wherever they come from."""

import numpy as np
import pandas as pd
import pytest
import torch

from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.inputs import as_float32
from rayfed.data.loading import load
from rayfed.data.user_clients import Clients, user_population

SIZE = 300
TIMES = 1_700_000_000 + np.arange(SIZE)  # seconds; float32 counts by 128 there
CODES = 200_000_001 + np.arange(SIZE) % 2
SITE, LABEL = np.arange(SIZE) % 3, np.arange(SIZE) % 2
TIMES_BECOME = (
    r"300 different values become [34] as float32, in which models compute, such as 17000000\d\d(.\d+)? and 17000000"
)


def in_parquet(folder, values):
    pd.DataFrame({"t": values, "y": LABEL, "site": SITE}).to_parquet(folder / "visits.parquet")
    return "parquet", {"file": str(folder / "visits.parquet"), "features": ["t"], "label": "y", "client": "site"}


def in_csv(folder, values):
    pd.DataFrame({"t": values, "y": LABEL, "site": SITE}).to_csv(folder / "visits.csv", index=False)
    return "csv", {"file": str(folder / "visits.csv"), "features": ["t"], "label": "y", "client": "site"}


def in_lists(folder, values):
    pd.DataFrame({"t": [[value, 0.5] for value in values.tolist()], "y": LABEL}).to_parquet(folder / "lists.parquet")
    return "parquet", {"file": str(folder / "lists.parquet"), "features": ["t"], "label": "y"}


def in_parts(folder, values):
    name, options = in_parquet(folder, values)
    return name, options | {"features": {"when": ["t"]}}


def in_npz(folder, values):
    is_test = np.arange(SIZE) % 4 == 0
    np.savez(folder / "visits.npz", images=values[:, None].astype(float), labels=LABEL, client=SITE, is_test=is_test)
    return "npz", {"file": str(folder / "visits.npz")}


def as_target(folder, values):
    table = pd.DataFrame({"x": np.linspace(0, 1, SIZE), "y": values + 0.5, "site": SITE})
    table.to_parquet(folder / "visits.parquet")
    return "parquet", {"file": str(folder / "visits.parquet"), "features": ["x"], "label": "y", "client": "site"}


@pytest.mark.parametrize(
    "reader", [in_parquet, in_csv, in_lists, in_parts, in_npz, as_target], ids=lambda r: r.__name__
)
@pytest.mark.parametrize(
    ("values", "words"), [(TIMES, "300 different values become"), (CODES, "2 different values become 1")]
)
def test_readers_refuse_what_becomes_equal(tmp_path, reader, values, words):
    with pytest.raises(
        UsageError, match=rf"{words}.* as float32.*; subtract the first of times, number codes from 0, or"
    ):
        load(*reader(tmp_path, values))
    load(*reader(tmp_path, values - values[0]))


FORMS = {
    "column": lambda values: values[:, None].astype(float),
    "tensor": lambda values: torch.from_numpy(values[:, None]).double(),
    "parts": lambda values: {"time": values.astype(float), "age": np.ones(SIZE)},
    "images": lambda values: np.broadcast_to(values.astype(float)[:, None, None, None], (SIZE, 1, 4, 4)),
}


def part(x, y):
    """All rows as one part."""
    return {"train": (x, y), "test": (x, y)}


@pytest.mark.parametrize("form", FORMS)
def test_clients_in_python_are_refused(form):
    given = part(FORMS[form](TIMES), LABEL)
    with pytest.raises(UsageError, match=rf"clients\[0\].train: x.*: {TIMES_BECOME}"):
        user_population([given])
    with pytest.raises(UsageError, match=rf"clients\[0\].train: x.*: {TIMES_BECOME}"):
        user_population(Clients({"train": [SIZE], "test": [SIZE]}, lambda number: given), num_classes=2)


@pytest.mark.parametrize("y", [TIMES, TIMES + 0.25])
def test_numbers_to_predict_are_refused_too(y):
    with pytest.raises(UsageError, match=rf"clients\[0\].train: y: {TIMES_BECOME}"):
        user_population([part(np.ones((SIZE, 2)), y)], classes=False)


def test_a_dataset_of_ones_own():
    with pytest.raises(UsageError, match=rf"dataset mine: images: {TIMES_BECOME}"):
        Dataset.of("mine", TIMES[:, None].astype(float), LABEL)


def test_the_message_names_the_column_and_two_values():
    x = np.stack([np.linspace(0, 1, SIZE), TIMES + 0.5], 1)
    with pytest.raises(UsageError) as caught:
        as_float32("x", x)
    words = str(caught.value)
    assert words.startswith("x, column 1: 300 different values become 3 as float32, in which models compute, such as ")
    first, second = words.split("such as ")[1].split(";")[0].split(" and ")
    assert float(second) - float(first) == 1
    assert np.float32(first) == np.float32(second)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.full(9, 200_000_001), "such as 200000001 to 200000000"),  # a client with one code
        (np.arange(4) * 10_000_001, "such as 30000003 to 30000004"),
        (-np.arange(4) * 10_000_001.0, "such as -30000003 to -30000004"),
    ],
)
def test_whole_numbers_that_are_rounded_are_noted(capsys, values, told):
    np.testing.assert_array_equal(as_float32("visits.csv: column 'code'", values), values.astype(np.float32))
    rounded = "as float32, whole numbers above 16,777,216 are rounded"
    assert capsys.readouterr().err.startswith(f"rayfed: visits.csv: column 'code': {rounded}, {told}; subtract")


def test_many_clients_are_noted_once(capsys):
    user_population([part(np.full((9, 1), code), LABEL[:9]) for code in (200_000_001.0, 200_000_002.0, 200_000_003.0)])
    assert capsys.readouterr().err.count("clients: x: as float32, whole numbers above 16,777,216 are rounded; ") == 1


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(300) * 2**17,  # above 2**24, but float32 holds each of them
        np.arange(2**24 - 300, 2**24),
        RANDOM.random(100_000),  # a few become equal by chance
        RANDOM.normal(37.2, 0.5, 100_000),
        RANDOM.normal(48.1374, 0.05, 10_000),  # degrees of latitude in a city
        RANDOM.normal(0, 1e-30, 1000),
        np.full(9, 0.1),
        np.array([0.1, np.nan, 1e300]),  # refused elsewhere
        TIMES.astype(np.float32),
        (TIMES % 2).astype(bool),
        np.zeros((0, 3)),
    ],
)
def test_other_numbers_pass_in_silence(capsys, values):
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(as_float32("x", values), values.astype(np.float32))
    assert capsys.readouterr().err == ""
