"""Search libraries of Ray Tune choose hyperparameters: in a `Tuner` of the user's own, and in a sweep.

The best rate is 0.5, and the loss falls towards it; see `helpers.one_weight`.
"""

import os

import pytest
from ray import tune

import rayfed
from helpers.one_weight import GIVEN, QUICK, ROUNDS
from helpers.ray_session import start_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LIBRARIES = {
    "OptunaSearch": ("ray.tune.search.optuna", "optuna"),
    "HyperOptSearch": ("ray.tune.search.hyperopt", "hyperopt"),
    "BayesOptSearch": ("ray.tune.search.bayesopt", "bayes_opt"),
}
SAMPLES = 4


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start_ray()


def searcher(name):
    """A search algorithm without a space of its own."""
    module, package = LIBRARIES[name]
    found = pytest.importorskip(package)
    if name == "BayesOptSearch" and not hasattr(found, "UtilityFunction"):
        pytest.skip("Ray needs bayesian-optimization==1.4.3")
    return getattr(pytest.importorskip(module), name)()


def final_loss(rate):
    return (1 - 2 * rate) ** (2 * ROUNDS)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_users_own_tuner(name):
    trainable = rayfed.trainable(QUICK | {"experiment": "own"}, **GIVEN)
    tuner = tune.Tuner(
        trainable,
        param_space={"local.lr": tune.uniform(0.01, 0.5)},
        tune_config=tune.TuneConfig(
            search_alg=searcher(name), metric="last_gain", mode="max", num_samples=SAMPLES, max_concurrent_trials=1
        ),
        run_config=tune.RunConfig(name="a", storage_path=os.path.abspath("ray"), verbose=0),
    )
    grid = tuner.fit()
    assert not grid.errors
    rates = [result.config["local.lr"] for result in grid]
    assert len(set(rates)) == SAMPLES
    for result, rate in zip(grid, rates, strict=True):
        assert result.metrics["last_gain"] == pytest.approx(-final_loss(rate), rel=1e-3, abs=1e-9)
    trials = rayfed.read_results("results", "own").trials
    assert sorted(trials["local.lr"]) == sorted(rates)
    assert set(trials["status"]) == {"done"}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_sweep(name):
    spaces = {"local.lr": {"uniform": [0.01, 0.5]}}
    if name != "BayesOptSearch":  # which searches floats only
        spaces["local.steps"] = {"randint": [1, 2]}
    search = {"samples": SAMPLES, "max_concurrent": 1}
    space = QUICK | spaces | {"experiment": "swept", "seeds": [0, 1], "search": search}
    result = rayfed.sweep(space, **GIVEN, quiet=True, search_alg=searcher(name))
    assert set(result.trials["status"]) == {"done"}
    assert result.trials["seed"].value_counts().to_dict() == {0: SAMPLES, 1: SAMPLES}
    assert result.trials["local.lr"].between(0.01, 0.5).all()
