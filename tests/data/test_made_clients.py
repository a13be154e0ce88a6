"""Clients that are made on demand, and all clients as columns."""

from dataclasses import replace

import numpy as np
import pytest

import rayfed
from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.population import MadeClients, population_hash
from rayfed.data.sets import synthetic
from rayfed.data.user_clients import user_population

SIZES = {"train": np.array([12, 20, 8, 16]), "val": np.array([4, 0, 4, 4]), "test": np.array([4, 8, 4, 4])}
SHORT = {"rounds": 3, "model.name": "mlp", "local.lr": 0.1, "local.batch_size": 4, "quiet": True, "num_classes": 3}


def make(number):
    rng = np.random.default_rng(number)

    def part(split):
        size = int(SIZES[split][number])
        y = rng.integers(0, 3, size)
        return (rng.normal(size=(size, 5)) + y[:, None]).astype(np.float32), y

    return {split: part(split) for split in SIZES}


def listed():
    return [make(number) for number in range(4)]


def population(**changes):
    return user_population(rayfed.Clients(**{"sizes": SIZES, "make": make} | changes), 3)


def test_clients_are_made_when_they_are_asked_for():
    asked = []
    made = population(make=lambda number: asked.append(number) or make(number))
    assert asked == [0, 0, 3, 3]  # for the form of an input, and to see whether they are the same again
    asked.clear()
    assert made.clients.sizes.tolist() == [[12, 4, 4], [20, 0, 8], [8, 4, 4], [16, 4, 4]]
    assert (len(made.clients), made.clients.domain(3)) == (4, "client-3")
    assert asked == []
    np.testing.assert_array_equal(made.clients[2].test.x, make(2)["test"][0])
    assert asked == [2]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cohort": 2}, id="a cohort"),
        pytest.param({"algorithm.name": "scaffold"}, id="states"),
        pytest.param({"unseen_clients": 1, "cohort": 2, "evaluate.splits": ["test"]}, id="unseen clients"),
        pytest.param({"algorithm.name": "ditto", "metrics.f1": {}}, id="metrics"),
        pytest.param(
            {"placement.hosts": 2, "algorithm.name": "scaffold"}, id="hosts", marks=(pytest.mark.ray, pytest.mark.slow)
        ),
    ],
)
def test_a_run_is_that_of_a_list(tmp_path, options):
    results = [
        rayfed.run(**SHORT, **(options | hosts), clients=clients, results=str(tmp_path / name))
        for name, clients, hosts in (
            ("list", listed(), {"placement.hosts": 0}),
            ("made", rayfed.Clients(SIZES, make), {}),
        )
    ]
    assert results[0].weights_hash == results[1].weights_hash
    columns = ["round", "client", "split", "metric", "value"]
    first, second = (result.metrics[columns].sort_values(columns[:-1]).reset_index(drop=True) for result in results)
    assert first.equals(second)


def test_the_hash_follows_what_is_declared_and_a_few_contents():
    def other(number):
        return make(number) if number else {**make(0), "test": (make(0)["test"][0] + 1, make(0)["test"][1])}

    digests = [
        population_hash(people)
        for people in (
            population(),
            population(),
            population(domains=["a", "b", "a", "b"]),
            population(make=other),
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": {"train": [1]}}, "clients.sizes: .*test"),
        ({"sizes": {**SIZES, "test": [4, 8]}}, r"sizes\['test'\]: got int64 \[2\]; expected 4"),
        ({"sizes": {**SIZES, "train": [1.5, 2, 3, 4]}}, r"sizes\['train'\]: .*integers"),
        ({"sizes": {**SIZES, "train": [11, 20, 8, 16]}}, r"make\(0\) returned 12 train examples, .* is 11"),
        ({"domains": ["a"]}, r"sizes\['train'\]: got int64 \[4\]; expected 1"),
        ({"make": lambda number: {"train": make(number)["train"]}}, r"clients\[0\]: got the keys train; expected"),
    ],
)
def test_what_cannot_be_clients_is_one_line(changes, message):
    with pytest.raises(UsageError, match=message):
        population(**changes)


def test_an_error_of_the_users_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        population(make=lambda number: 1 / number)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (lambda n: make(n) | {"train": make(0)["train"]}, r"make\(1\) returned 12 train examples"),
        (lambda n: make(n) | {"test": (make(n)["test"][0][:, :2], make(n)["test"][1])}, r"clients\[1\].test: .*\(2,\)"),
        (lambda n: make(n) | {"test": (make(n)["test"][0], make(n)["test"][1] + 3)}, r"clients\[1\].test: label"),
        (lambda n: {k: (x[:, :2], y) for k, (x, y) in make(n).items()}, r"clients\[1\].train: .*\(2,\).* are \(5,\)"),
    ],
)
def test_a_client_that_is_not_as_declared_is_named_when_it_is_made(clients, message):
    with pytest.raises(UsageError, match=message):
        population(make=lambda number: clients(number) if number == 1 else make(number)).clients[1]


@pytest.mark.parametrize("partition", [{"test": 0.2}, {"test": None}, {"test": 0.0, "validation": 0.0}])
def test_many_clients_of_a_synthetic_set_are_those_of_few(monkeypatch, partition):
    options = {"clients": 12, "most_examples": 70}
    pooled = load("synthetic", options, "natural", partition)
    monkeypatch.setattr(synthetic, "MOST_POOLED", 11)
    made = load("synthetic", options, "natural", partition)
    assert isinstance(made.clients.source, MadeClients)
    assert population_hash(replace(pooled, clients=list(pooled.clients))) == population_hash(
        replace(made, clients=list(made.clients))
    )
    assert made.clients.domain(7) == pooled.clients.domain(7)
