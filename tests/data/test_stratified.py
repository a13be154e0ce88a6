"""Stratified parts, splits that are drawn anew for each seed, and names of clients as the table gives them."""

import numpy as np
import pandas as pd
import pytest

from rayfed.core.errors import UsageError
from rayfed.data.loading import load, load_partitioned
from rayfed.data.partitions.base import partition_hash
from rayfed.data.partitions.stratified import quotas, single_rows, stratified
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan


class TestQuotas:
    @pytest.mark.parametrize(
        ("sizes", "count", "expected"),
        [
            ([60, 40], 10, [6, 4]),
            ([115, 8], 31, [29, 2]),  # 28.98 and 2.02
            ([115, 8], 9, [8, 1]),  # 8.41 and 0.59
            ([98, 2], 10, [9, 1]),  # 0.2 of a row: at least one
            ([50, 30, 20], 7, [4, 2, 1]),  # 3.5, 2.1 and 1.4
            ([9, 1], 5, [5, 0]),  # the only row of a class stays in the rest
            ([2, 2, 2], 2, [1, 1, 0]),  # no room for all classes
            ([3, 3], 6, [3, 3]),
            ([5], 2, [2]),
            ([4, 4], 0, [0, 0]),
        ],
    )
    def test_by_hand(self, sizes: list[int], count: int, expected: list[int]) -> None:
        assert quotas(sizes, count) == expected

    def test_any_sizes_add_up(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(500):
            sizes = random.integers(1, 30, random.integers(1, 8)).tolist()
            count = int(random.integers(0, sum(sizes) + 1))
            parts = quotas(sizes, count)
            assert sum(parts) == count
            assert all(0 <= part <= size for part, size in zip(parts, sizes, strict=True))
            several = [place for place, size in enumerate(sizes) if size > 1]
            if len(several) <= count <= sum(size - 1 for size in sizes):
                assert all(1 <= parts[place] < sizes[place] for place in several)


def test_a_draw_has_these_numbers_and_the_last_rows_of_each_class() -> None:
    classes = np.array([0, 1, 0, 1, 0, 0, 0, 1, 0, 0])
    rows = np.arange(10)
    assert np.flatnonzero(stratified(rows, 3, classes)).tolist() == [7, 8, 9]
    assert single_rows(np.array([0, 1, 2]), classes) == [1]


@pytest.fixture
def table(tmp_path):
    """Four hospitals; one in fifteen patients of the third is healthy."""
    random = np.random.default_rng(0)
    sizes = {"cleveland": 120, "hungarian": 90, "switzerland": 60, "va": 80}
    rows = []
    for number, (hospital, size) in enumerate(sizes.items()):
        for patient in range(size):
            healthy = patient % 15 == 0 if hospital == "switzerland" else patient % 2 == 0
            rows.append(
                (hospital, random.normal(number, 1 + number), random.normal(200, 50), ("ill", "healthy")[healthy])
            )
    file = tmp_path / "heart.csv"
    pd.DataFrame(rows, columns=["hospital", "age", "chol", "state"]).to_csv(file, index=False)
    return {"file": str(file), "features": ["age", "chol"], "label": "state", "client": "hospital"}


class TestOwnTables:
    def test_parts_have_the_classes_in_proportion_by_default(self, table) -> None:
        for seed in range(3):
            clients = load("csv", table, None, {"redraw": True}, seed=seed).clients
            healthy = [[int((part.y == 0).sum()) for part in client.parts] for client in clients]
            sizes = [[len(part) for part in client.parts] for client in clients]
            assert sizes[2] == [41, 4, 15]  # a tenth and a quarter, rounded as without strata
            assert healthy[2] == [2, 1, 1]
            assert healthy[0] == [40, 5, 15]  # of 4.5 and 4.5 rows, the first class has one more

    def test_otherwise_small_parts_may_have_one_class(self, table) -> None:
        whole = [load("csv", table, None, {"redraw": True, "stratify": False}, seed=seed) for seed in range(20)]
        sizes = [[len(part) for part in population.clients[2].parts] for population in whole]
        assert sizes == [[41, 4, 15]] * 20
        assert any(len(np.unique(population.clients[2].val.y)) == 1 for population in whole)

    def test_clients_and_classes_are_called_as_in_the_table(self, table) -> None:
        population = load("csv", table)
        assert [client.domain for client in population.clients] == ["cleveland", "hungarian", "switzerland", "va"]
        assert population.class_names == ("healthy", "ill")

    def test_numbers_stay_numbers(self, tmp_path) -> None:
        file = tmp_path / "visits.csv"
        frame = pd.DataFrame({"x": np.arange(20.0), "y": [0, 1] * 10, "who": [7, 30] * 10})
        frame.to_csv(file, index=False)
        population = load("csv", {"file": str(file), "features": ["x"], "label": "y", "client": "who"})
        assert [client.domain for client in population.clients] == ["client-7", "client-30"]
        assert population.class_names is None

    def test_a_class_with_one_row_is_told_in_a_line(self, tmp_path, capsys) -> None:
        file = tmp_path / "rare.csv"
        frame = pd.DataFrame({"x": np.arange(40.0), "y": [0] * 39 + [1], "who": ["a"] * 20 + ["b"] * 20})
        frame.to_csv(file, index=False)
        load("csv", {"file": str(file), "features": ["x"], "label": "y", "client": "who"})
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.endswith(
            "rare: class 1 of b (1): one row, which is in one part alone; partition.stratify cannot divide it"
        )

    def test_numbers_as_labels_have_no_strata(self, tmp_path) -> None:
        file = tmp_path / "numbers.csv"
        frame = pd.DataFrame({"x": np.arange(40.0), "y": np.arange(40) / 7, "who": ["a"] * 20 + ["b"] * 20})
        frame.to_csv(file, index=False)
        options = {"file": str(file), "features": ["x"], "label": "y", "client": "who"}
        assert len(load("csv", options).clients) == 2
        with pytest.raises(
            UsageError, match=r"partition.stratify=true: the labels of numbers are float32 \[40\], and no"
        ):
            load("csv", options, None, {"stratify": True})


class TestNamedDatasets:
    """Their splits are published, or recorded in tests: nothing changes them."""

    def test_are_not_stratified_unless_asked_for(self) -> None:
        plain, off, on = (
            load("mini_digits", {"per_domain": 60}, "domains", options).partition_hash
            for options in ({}, {"stratify": False}, {"stratify": True})
        )
        assert plain == off
        assert plain != on


class TestRedraw:
    @pytest.mark.parametrize("name", ["natural", "domains"])
    def test_each_seed_has_a_split_of_its_own(self, table, name: str) -> None:
        options = dict(table)
        if name == "domains":
            options["domain"] = options.pop("client")
        kept = [load("csv", options, name, {"test": 0.25}, seed=seed) for seed in range(3)]
        redrawn = [load("csv", options, name, {"test": 0.25, "redraw": True}, seed=seed) for seed in range(3)]
        assert len({population.partition_hash for population in kept}) == 1
        assert len({population.partition_hash for population in redrawn}) == 3
        assert {population.test_drawn for population in kept + redrawn} == {True}
        seeded = load("csv", options, name, {"test": 0.25, "seed": 2})
        assert seeded.partition_hash == redrawn[2].partition_hash

    def test_a_partition_that_follows_the_seed_can_be_kept(self) -> None:
        options = {"clients": 3, "redraw": False}
        hashes = {
            load("mini_digits", {"per_domain": 60}, "iid", options, seed=seed).partition_hash for seed in range(3)
        }
        assert hashes == {load("mini_digits", {"per_domain": 60}, "iid", {"clients": 3, "seed": 0}).partition_hash}

    def test_what_is_recorded(self, table) -> None:
        values = {"data": {"name": "csv", **table}, "model.name": "mlp", "partition.redraw": True, "seed": 1}
        row = make_plan(Config.read(values)).values()
        sizes = {key: row[f"examples_{key}"] for key in ("train", "val", "test")}
        assert sizes == {
            "train": 237,
            "val": 25,
            "test": 88,
        }  # 30 + 23 + 15 + 20 for testing, 9 + 6 + 4 + 6 of the rest
        assert (row["test_drawn"], row["partition_seed"]) == (True, 1)
        assert make_plan(Config.read({"model.name": "mlp"})).values()["test_drawn"] is False

    @pytest.mark.parametrize(
        ("partition", "words"),
        [
            ({"seed": 3}, "partition.redraw=true: partition.seed=3 gives all seeds one split; give one of them"),
            (
                {},
                "partition.redraw=true: mini_digits has test examples of its own, which no seed draws; give partition",
            ),
        ],
    )
    def test_what_cannot_be_drawn_anew_is_refused(self, partition: dict, words: str) -> None:
        with pytest.raises(UsageError, match=words.replace(".", r"\.")):
            load("mini_digits", {}, "domains", {"redraw": True, **partition})

    def test_a_published_partition_is_refused(self, tmp_path) -> None:
        with pytest.raises(UsageError, match=r"partition\.redraw=true: split\.parquet is one split for all seeds"):
            load("mini_digits", {}, "file", {"file": "split.parquet", "redraw": True})


def test_of_partitions_that_deal_classes_each_client_is_stratified(table) -> None:
    """With `dirichlet`, the test and validation parts of a client have its own classes in proportion."""
    options = {key: value for key, value in table.items() if key != "client"}
    dataset, clients = load_partitioned("csv", options, "dirichlet", {"clients": 4, "alpha": 1.0})
    for client in clients:
        rows = np.concatenate(client[2:])
        share = (dataset.labels[rows] == 1).mean()
        ill = int((dataset.labels[client.test] == 1).sum())
        assert abs(ill - share * len(client.test)) <= 1
    assert partition_hash(dataset, clients) != load("csv", options, "dirichlet", {"clients": 4, "alpha": 1.0,
        "stratify": False}).partition_hash  # fmt: skip
