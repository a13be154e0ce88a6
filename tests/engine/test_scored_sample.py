"""Evaluation of a fixed sample of the clients (`evaluate.clients`)."""

import numpy as np
import pytest

import rayfed
from rayfed.core.errors import UsageError
from rayfed.experiments import plan
from rayfed.reports.render import render


def clients(count):
    rng = np.random.default_rng(0)

    def part(size):
        y = rng.integers(0, 2, size)
        return (rng.normal(size=(size, 3)) + y[:, None]).astype(np.float32), y

    return [{"train": part(6), "val": part(4), "test": part(4)} for _ in range(count)]


@pytest.fixture
def run(tmp_path):
    def run(**options):
        options = {"model.name": "mlp", "rounds": 2, "cohort": 4, "local.lr": 0.1, "quiet": True} | options
        return rayfed.run(clients=clients(20), results=str(tmp_path), **options)

    return run


def scored(result):
    tests = result.metrics.query("split == 'test' and metric == 'accuracy'")
    return {tuple(sorted(rows["client"])) for _, rows in tests.groupby("round")}


def test_the_sample_is_the_same_in_all_rounds_and_for_all_methods(run):
    methods = ["fedavg", "scaffold", "fedrep"]
    samples = [scored(run(**{"algorithm.name": name, "evaluate.clients": 5})) for name in methods]
    assert samples[0] == samples[1] == samples[2]
    (sample,) = samples[0]
    assert len(sample) == 5
    assert scored(run(**{"evaluate.clients": 5, "seed": 1})) != samples[0]


def test_scores_are_those_of_evaluating_all(run):
    whole, some = run(), run(**{"evaluate.clients": 5})
    assert some.weights_hash == whole.weights_hash
    keys = ["round", "client", "split", "metric"]
    together = some.metrics.merge(whole.metrics, on=keys, suffixes=("", "_whole"))
    assert len(together) == len(some.metrics)
    assert (together["value"] == together["value_whole"]).all()


def test_many_clients_are_sampled_by_default_and_the_report_says_so(run, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "MOST_CLIENTS_SCORED", 10)
    monkeypatch.setattr(plan, "CLIENTS_SCORED", 7)
    result = run()
    assert len(next(iter(scored(result)))) == 7
    assert "a fixed sample of 7 clients" in " ".join(render(tmp_path).split())


@pytest.mark.parametrize(("value", "message"), [(21, "there are 20"), (0, "expected"), ("cohort", "expected")])
def test_no_such_sample(run, value, message):
    with pytest.raises(UsageError, match=f"evaluate.clients={value!r}: {message}"):
        run(**{"evaluate.clients": value})
