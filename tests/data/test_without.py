"""data.without: clients that are left out by name; the others keep their examples."""

import numpy as np
import pandas as pd
import pytest
import torch

import rayfed
from rayfed.cli.main import main
from rayfed.core.errors import UsageError
from rayfed.data.loading import load, load_partitioned
from rayfed.data.partitions.base import partition_hash
from rayfed.data.sets.heart_disease import HeartDisease
from rayfed.data.user_clients import Clients
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary

HOSPITALS = ["cleveland", "hungary", "switzerland", "long_beach"]


def assert_equal_examples(found, expected):
    for part, same in zip(found.parts, expected.parts, strict=True):
        assert np.array_equal(part.x, same.x)
        assert np.array_equal(part.y, same.y)


@pytest.fixture
def visits(tmp_path):
    """A table of six clients in three domains; the only input is the row."""
    rows = np.arange(120)
    city = np.array(["north", "south", "west"])[rows % 3]
    ward = np.array(list("abcdef"))[rows % 6]
    table = pd.DataFrame({"x": rows.astype(float), "label": rows // 60, "ward": ward, "city": city})
    table.to_csv(tmp_path / "visits.csv", index=False)
    return {"file": str(tmp_path / "visits.csv"), "features": ["x"], "client": "ward"}


@pytest.mark.parametrize("partition", [{}, {"test": 0.25}, {"test": 0.25, "clients_per_domain": 2}])
def test_the_others_keep_their_examples_and_are_numbered_anew(partition):
    whole = load("heart_disease", {}, "domains", partition)
    without = load("heart_disease", {"without": ["hungary", "long_beach"]}, "domains", partition)
    kept = [client for client in whole.clients if client.domain in ("cleveland", "switzerland")]
    assert [client.domain for client in without.clients] == [client.domain for client in kept]
    assert [client.id for client in without.clients] == list(range(len(kept)))
    for client, expected in zip(without.clients, kept, strict=True):
        assert_equal_examples(client, expected)
    count = len(kept)
    assert without.left_out == f"{count} of {2 * count} clients (hungary, long_beach)"
    assert without.partition_hash != whole.partition_hash
    assert len(without.clients.source.examples()[0]) == without.clients.sizes.sum()


def test_the_hash_is_that_of_the_remaining_clients():
    dataset, clients = load_partitioned("heart_disease", {"without": "hungary"})
    few, same = load_partitioned("heart_disease", {"domains": ["cleveland", "switzerland", "long_beach"]})
    assert [len(client.train) for client in clients] == [len(client.train) for client in same]
    assert partition_hash(dataset, clients) == load("heart_disease", {"without": ["hungary"]}).partition_hash
    assert dataset.num_classes == few.num_classes


def test_an_own_column_of_clients_gives_the_names_beside_the_domains(visits):
    assert {c.domain for c in load("csv", visits | {"without": ["b", "e"]}).clients} == {"a", "c", "d", "f"}
    in_cities = visits | {"domain": "city"}
    assert [c.domain for c in load("csv", in_cities).clients] == ["north", "south", "west"] * 2
    one_ward = load("csv", in_cities | {"without": ["e"]})
    assert sorted(set(np.concatenate([part.x for c in one_ward.clients for part in c.parts]).ravel() % 6)) == [
        0,
        1,
        2,
        3,
        5,
    ]
    one_city = load("csv", in_cities | {"without": ["south"]})
    assert [c.domain for c in one_city.clients] == ["north", "west"] * 2
    assert one_city.left_out == "2 of 6 clients (south)"


def test_clients_that_are_numbers_in_their_column_go_by_these(tmp_path):
    rows = np.arange(60)
    table = pd.DataFrame({"x": rows * 1.0, "label": rows // 30, "ward": 10 + rows % 3, "city": rows % 3 // 2})
    table.to_csv(tmp_path / "t.csv", index=False)
    options = {"file": str(tmp_path / "t.csv"), "features": ["x"], "client": "ward", "domain": "city"}
    for given in ("11", "client-11", 11):
        population = load("csv", options | {"without": [given]})
        held = np.concatenate([part.x for client in population.clients for part in client.parts])
        assert set(held.ravel() % 3) == {0, 2}
    with pytest.raises(UsageError, match=r"^data\.without=client-1: no such client in t; known: 10, 11, 12$"):
        load("csv", options | {"without": ["client-1"]})


def test_clients_without_names_go_by_their_number(visits):
    whole = load("csv", visits, "iid", {"clients": 5})
    without = load("csv", visits | {"without": ["client-1", "client-4"]}, "iid", {"clients": 5})
    assert without.left_out == "2 of 5 clients (client-1, client-4)"
    for client, place in zip(without.clients, (0, 2, 3), strict=True):
        assert_equal_examples(client, whole.clients[place])


def test_clients_that_are_made_on_demand():
    whole = load("synthetic", {"clients": 10_001})
    without = load("synthetic", {"clients": 10_001, "without": ["client-0", "client-10000"]})
    assert len(without.clients) == 9_999
    assert_equal_examples(without.clients[0], whole.clients[1])
    assert without.partition_hash != whole.partition_hash
    other = load("synthetic", {"clients": 10_001, "without": ["client-0", "client-9999"]})
    assert other.partition_hash != without.partition_hash


def test_tables_are_standardised_without_them(visits):
    options = {"standardize": "global", "without": ["a", "b", "c"]}
    values = {"data": {"name": "csv", **visits, **options}, "model": {"name": "mlp", "hidden": []}}
    population = make_plan(Config.read(values)).population
    trained = np.concatenate([client.train.x for client in population.clients])
    assert trained.mean() == pytest.approx(0, abs=1e-6)
    assert trained.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("key", ["left_out", "absent"])
def test_pooled_patients_of_heart_disease_do_not_count_them(key):
    pooled = HeartDisease(standardize="pooled")
    mark = pooled.without if key == "left_out" else pooled.marked_absent
    dataset = mark(["hungary"]).load()
    counted = (dataset.domain != 1) & ~dataset.is_test
    trained = dataset.images[counted].astype(float)
    np.testing.assert_allclose(trained.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(trained.std(0, ddof=1), 1, atol=1e-6)


def test_a_domain_that_nobody_holds_is_another_one():
    population = load("heart_disease", {"without": ["hungary"]}, leave_out="switzerland")
    assert [client.domain for client in population.clients] == ["cleveland", "long_beach"]
    assert [(test.domain, test.split) for test in population.tests] == [("switzerland", "ood")]
    with pytest.raises(UsageError, match=r"data\.without=hungary: no such client in heart_disease"):
        load("heart_disease", {"without": ["hungary"]}, leave_out="hungary")


def test_an_empty_client_can_be_left_out(tmp_path):
    table = pd.DataFrame(
        {"x": np.arange(9.0), "label": [0, 1, 0] * 3, "ward": list("aaaabbbbc"), "part": ["train"] * 8 + ["test"]}
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    options = {"file": str(tmp_path / "t.csv"), "features": ["x"], "client": "ward", "split": "part"}
    with pytest.raises(
        UsageError, match=r"client 2 \(c\) of t has no training examples .* leave them out with data\.without"
    ):
        load("csv", options)
    assert [client.domain for client in load("csv", options | {"without": ["c"]}).clients] == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["va"], "va: no such client in heart_disease; known: cleveland, hungary, switzerland, long_beach"),
        (HOSPITALS, "cleveland, hungary, long_beach, switzerland: leaves no client of heart_disease to train on"),
    ],
)
def test_refusals(names, words):
    with pytest.raises(UsageError) as refused:
        load("heart_disease", {"without": names})
    assert str(refused.value) == f"data.without={words}"


def test_of_many_names_the_message_has_a_near_one_or_the_first():
    with pytest.raises(UsageError, match=r"client-5000: no such client in synthetic; did you mean client-500\?$"):
        load("synthetic", {"clients": 600, "without": ["client-5000"]})
    with pytest.raises(UsageError, match=r"ward b: .*; known: 0, 1, .*, 11, … \(600 in all\)$"):
        load("synthetic", {"clients": 600, "without": ["ward b"]})


def test_names_are_checked_and_neither_order_nor_an_empty_list_changes_a_trial():
    def trial(*names):
        return make_plan(
            Config.read({"data.name": "heart_disease", "data.without": [*names], "model.name": "mlp"})
        ).trial

    assert trial("hungary", "cleveland") == trial("cleveland", "hungary", "cleveland")
    whole = make_plan(Config.read({"data.name": "heart_disease", "model.name": "mlp"}))
    assert trial() == whole.trial
    assert trial("hungary") not in (whole.trial, trial("cleveland"))
    with pytest.raises(UsageError, match=r"^data\.without=True: expected a string or a list of strings"):
        Config.read({"data.without": True})
    with pytest.raises(UsageError, match=r"^data\.witout: no such key; did you mean data\.without\?$"):
        Config.read({"data.witout": "a"})


def given_clients():
    rng = np.random.default_rng(0)
    clients = []
    for name in ("a", "b", "c", None):
        x = rng.normal(size=(12, 3)).astype(np.float32)
        y = rng.integers(0, 2, 12)
        clients.append({"train": (x[:8], y[:8]), "test": (x[8:], y[8:]), "domain": name})
    return clients


def test_own_clients_in_python(tmp_path):
    clients = given_clients()
    config = {"data.without": ["b", "client-3"], "results": str(tmp_path), "rounds": 2}
    given = {"clients": clients, "model": lambda: torch.nn.Linear(3, 2)}
    result = rayfed.run(config, **given)
    assert sorted(set(result.metrics["domain"]) - {"global"}) == ["a", "c"]
    alone = rayfed.run({"results": str(tmp_path), "rounds": 2}, clients=[clients[0], clients[2]], model=given["model"])
    assert result.weights_hash == alone.weights_hash
    (row,) = rayfed.load(tmp_path, trial=result.trial, **given).trials.to_dict("records")
    assert row["data.without"] == '["b", "client-3"]'
    plan = make_plan(Config.read(config), Given(**given))
    assert "; left out: 2 of 4 clients (b, client-3); " in run_summary(plan)
    words = r"^data\.\*: clients= are given in place of data and partition; leave out data\.\* except data\.without$"
    with pytest.raises(UsageError, match=words):
        rayfed.run({"data.name": "mnist"}, **given)


def test_own_clients_that_are_made_on_demand():
    clients = given_clients()
    sizes = {"train": [8] * 4, "test": [4] * 4}
    made = Clients(sizes, lambda number: {key: clients[number][key] for key in ("train", "test")})
    given = Given(clients=made, model=lambda: torch.nn.Linear(3, 2), num_classes=2)
    population = make_plan(Config.read({"data.without": ["client-1"]}), given).population
    assert [client.domain for client in population.clients] == ["client-0", "client-2", "client-3"]
    assert np.array_equal(population.clients[1].train.x, clients[2]["train"][0])


def test_a_sweep_leaves_out_one_after_the_other_in_tables_of_their_own(tmp_path, capsys):
    space = {
        "data": {"name": "heart_disease", "without": {"grid": [[], ["hungary"], ["switzerland"]]}},
        "model": {"name": "mlp", "hidden": []},
        "local.batch_size": 4,
        "rounds": 1,
        "seeds": [0, 1],
    }
    rayfed.sweep(space, results=str(tmp_path), experiment="sites", quiet=True)
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--experiment", "sites"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line.partition(")")[0] for line in lines if line.startswith("sites (")]
    assert headings == [
        'sites (data.without=["hungary"]',
        'sites (data.without=["switzerland"]',
        "sites (data.without=none",
    ]


def test_the_command_shows_who_is_left(capsys):
    assert main(["partition", "data.name=heart_disease", "data.without=hungary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "cleveland"], ["1", "switzerland"], ["2", "long_beach"]]
