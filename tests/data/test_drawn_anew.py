"""Data of a user's own functions must be the same whenever they are called: unseeded draws are refused at the plan."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

import rayfed
from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.loading import load
from rayfed.data.partitions.base import Partition
from rayfed.data.population import TestSet
from rayfed.data.user_clients import user_population

CALLS = itertools.count()
SIZES = {"train": [8] * 5, "val": [2] * 5, "test": [2] * 5}


def made(number, unseeded="", what="x"):
    """A client of which one part has inputs or labels that are drawn without a seed."""
    seeded = np.random.default_rng(number)
    client = {}
    for split, sizes in SIZES.items():
        rng = np.random.default_rng() if split == unseeded else seeded
        x, y = seeded.normal(size=(sizes[number], 3)), seeded.integers(0, 2, sizes[number])
        if what == "x":
            x = x + rng.normal()
        elif split == unseeded:
            # A few binary labels may be drawn equal twice, so these change with every call.
            y = (y + next(CALLS)) % 2
        client[split] = x, y
    return client


def population(make):
    return user_population(rayfed.Clients(SIZES, make), 2)


@pytest.mark.parametrize("split", SIZES)
def test_a_client_that_changes_is_refused(split):
    words = (
        rf"clients: make\(0\) returned other {split} examples the second time; .*np.random.default_rng\(0\) or the like"
    )
    with pytest.raises(UsageError, match=words):
        population(lambda number: made(number, split))
    assert len(population(made).clients) == 5


def test_labels_that_change_are_refused():
    with pytest.raises(UsageError, match=r"make\(0\) returned other train examples the second time"):
        population(lambda number: made(number, "train", "y"))


def test_the_last_client_is_looked_at_too():
    with pytest.raises(UsageError, match=r"make\(4\) returned other test examples the second time"):
        population(lambda number: made(number, "test" if number == 4 else ""))


def test_one_generator_for_all_clients_is_refused():
    shared = np.random.default_rng(0)
    with pytest.raises(UsageError, match=r"make\(0\) returned other"):
        population(
            lambda number: {split: (shared.normal(size=(n[0], 3)), np.zeros(n[0], int)) for split, n in SIZES.items()}
        )


def test_an_array_that_is_changed_in_place_is_refused():
    x = np.zeros((8, 3), np.float32)

    def make(number):
        x[0, 0] += 1
        return {"train": (x, np.zeros(8, int)), "test": (x[:2], np.zeros(2, int)), "val": (x[:2], np.zeros(2, int))}

    with pytest.raises(UsageError, match=r"make\(0\) returned other train"):
        population(make)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A dataset of which one array is drawn without a seed."""

    unseeded: str = rayfed.option("", help="what is drawn")

    def load(self) -> Dataset:
        rng = {name: np.random.default_rng(0) for name in ("images", "labels", "is_test", "client", "tests")}
        if self.unseeded:
            rng[self.unseeded] = np.random.default_rng()
        extra = TestSet("extra", "test", rayfed.Examples(rng["tests"].normal(size=(4, 3)), np.array([0, 1, 0, 1])))
        return Dataset.of(
            "drawn",
            rng["images"].normal(size=(200, 3)),
            rng["labels"].permutation(np.arange(200) % 2),
            is_test=rng["is_test"].permutation(np.arange(200) % 4 == 0),
            client=rng["client"].permutation(np.arange(200) % 5),
            tests=(extra,),
        )


@dataclass(frozen=True, kw_only=True)
class Shuffled(Partition):
    """A partition that draws without a seed."""

    seeded: bool = rayfed.option(False, help="whether it draws with a seed")

    def split(self, dataset):
        rows = np.random.default_rng(0 if self.seeded else None).permutation(dataset.rows())
        return [self.client_rows(k, "a", rows[k::2], rows[:0]) for k in range(2)]


@pytest.mark.parametrize("what", ["images", "labels", "is_test", "client", "tests"])
def test_a_dataset_that_changes_is_refused(what):
    words = "data: Drawn.load returns something else the second time; draw from a seeded generator, such as np.random"
    with pytest.raises(UsageError, match=words):
        load(f"{__name__}:Drawn", {"unseeded": what})


def test_a_partition_that_changes_is_refused():
    with pytest.raises(UsageError, match=r"partition: Shuffled.split returns something else the second time; draw"):
        load(f"{__name__}:Drawn", {}, f"{__name__}:Shuffled")
    assert len(load(f"{__name__}:Drawn", {}, f"{__name__}:Shuffled", {"seeded": True}).clients) == 2


def test_what_takes_long_is_loaded_once(monkeypatch):
    clock = itertools.count(step=3.0)
    monkeypatch.setattr("rayfed.data.loading.time.monotonic", lambda: next(clock))
    load(f"{__name__}:Drawn", {"unseeded": "images"})
