"""Silly values for every hyperparameter of every algorithm: one line that names the key, or a value within its bounds.

What is read is also planned with, as far as a plan is quick to make: no width or count passes that memory cannot hold.
"""

import contextlib
import dataclasses
import math

import pytest

from rayfed.algorithms import ALGORITHMS
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan

SILLY = [-1, 0, -0.5, 1.5, 10**12, math.nan, math.inf, -math.inf, "x", "inf", True, None, [], [0], [-1], [10**12], {}]


# Whole numbers without an upper bound: they take time only, or no more is taken than there is (or a check says so).
TIME = ("_epochs", "_steps", "anneal")
CLIPPED = {
    "adcol": {"server_batch_size"},
    "dp_adcol": {"server_batch_size"},
    "local_dp_adcol": {"server_batch_size"},
    "fada": {"server_batch_size", "target"},
    "faug": {"seed_examples"},
    "fedfomo": {"models"},
    "fedmix": {"mean_examples"},
    "gaussian_dp_fedbn": {"max_examples"},
    "vhl": {"virtual_batch_size"},
}


def fields(name):
    return dataclasses.fields(resolve(ALGORITHMS[name], ALGORITHMS, where="algorithm.name"))


def read(name, key, value):
    """(the configuration, ""), or (None, what is said against it)."""
    try:
        config = Config.read({"algorithm": {"name": name, key: value}, "model": {"name": "mlp", "hidden": [8]}})
        assert config.algorithm  # which is built when it is asked for
        return config, ""
    except UsageError as refusal:
        return None, str(refusal)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_of_every_type(name):
    for field in fields(name):
        for value in SILLY:
            config, refusal = read(name, field.name, value)
            assert config or (refusal.startswith(f"algorithm.{field.name}") and "\n" not in refusal), refusal
            found = getattr(config.algorithm, field.name) if config else 0
            for item in found if isinstance(found, list) else [found]:
                assert not isinstance(item, float) or math.isfinite(item), (field.name, value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_counts_that_take_memory_have_a_bound(name):
    counts = {field.name for field in fields(name) if "int" in str(field.type)}
    unbounded = {key for key in counts if read(name, key, [10**12])[0] or read(name, key, 10**12)[0]}
    assert {key for key in unbounded if not key.endswith(TIME)} == CLIPPED.get(name, set())


@pytest.fixture(scope="module")
def population():
    return make_plan(Config.read({"model.name": "mlp"})).population


@pytest.mark.parametrize("name", ALGORITHMS)
def test_whole_numbers_beyond_all_memory(name, population):
    for field in fields(name):
        for value in (10**12, [10**12]):
            config = read(name, field.name, value)[0] if "int" in str(field.type) else None
            if config:
                with contextlib.suppress(UsageError):
                    make_plan(config, population=population)
