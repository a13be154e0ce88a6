"""Search spaces: which configurations a sweep runs."""

from pathlib import Path

import pytest

from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_file
from rayfed.experiments.space import read_space

SPACES = sorted((Path(__file__).parents[2] / "tune_spaces").glob("*.yaml"))


def drawn(*sources):
    return [list(arm) for arm in read_space(*sources).arms]


def refusal(*sources):
    with pytest.raises(UsageError) as caught:
        read_space(*sources)
    return str(caught.value)


class TestGrids:
    def test_every_point_of_the_product_in_order(self):
        space = {"local.lr": {"grid": [0.1, 0.2]}, "local": {"batch_size": {"choice": [5, 10]}}, "rounds": 3}
        (arm,) = drawn(space)
        assert [(c["local"]["lr"], c["local"]["batch_size"]) for c in arm] == [(0.1, 5), (0.1, 10), (0.2, 5), (0.2, 10)]
        assert all(c["rounds"] == 3 for c in arm)

    def test_samples_caps_a_grid_the_same_way_each_time(self):
        space = {"local.lr": {"grid": [k / 100 for k in range(1, 51)]}, "search.samples": 7}
        first, second = drawn(space), drawn(space)
        assert first == second
        rates = [c["local"]["lr"] for c in first[0]]
        assert len(set(rates)) == 7
        assert rates == sorted(rates)
        assert drawn(space, {"search.seed": 1}) != first


ARMS = {
    "rounds": 3,
    "algorithm": {"name": "fedprox", "mu": 0.5},
    "arms": [{"algorithm.name": "fedavg", "rounds": 4}, {"algorithm.mu": {"grid": [1, 2]}}],
}


class TestArms:
    def test_an_arm_wins_over_the_keys_of_all(self):
        first, second = drawn(ARMS)
        assert first == [{"rounds": 4, "algorithm": {"name": "fedavg"}}]  # a new name drops the old one's keys
        assert [c["algorithm"] for c in second] == [{"name": "fedprox", "mu": 1}, {"name": "fedprox", "mu": 2}]

    def test_the_command_line_wins_over_the_arms(self):
        first, second = drawn(ARMS, {"rounds": 1})
        assert {c["rounds"] for c in [*first, *second]} == {1}


RANDOM = {
    "search": {"kind": "random", "samples": 60},
    "a": {"uniform": [2, 3]},
    "b": {"loguniform": [1e-4, 1]},
    "c": {"randint": [1, 3]},
    "d": {"choice": ["x", "y"]},
}


class TestRandom:
    def test_within_bounds(self):
        (arm,) = drawn(RANDOM)
        assert len(arm) == 60
        assert all(2 <= c["a"] < 3 and 1e-4 <= c["b"] <= 1 for c in arm)
        assert {c["c"] for c in arm} == {1, 2, 3}
        assert {c["d"] for c in arm} == {"x", "y"}
        assert all(type(c["c"]) is int for c in arm)

    def test_the_same_draws_each_time_and_others_with_another_seed(self):
        assert drawn(RANDOM) == drawn(RANDOM)
        assert drawn(RANDOM) != drawn(RANDOM, {"search.seed": 1})

    def test_arms_get_equal_budgets_and_draws_of_their_own(self):
        first, second = drawn(RANDOM, {"arms": [{"e": 0}, {"e": 1}]})
        assert len(first) == len(second) == 60
        assert [c["a"] for c in first] != [c["a"] for c in second]

    def test_lists_of_values_are_drawn_without_repetition(self):
        space = {
            "search": {"kind": "random", "samples": 5},
            "local.lr": {"choice": [0.1, 0.2]},
            "local.epochs": {"randint": [1, 3]},
        }
        (first,) = drawn(space)
        assert len({repr(one) for one in first}) == len(first) == 5
        assert drawn(space, {"search.samples": 3}) == [first[:3]]
        assert len(drawn(space, {"search.samples": 100})[0]) == 6  # there are no more
        mixed = space | {"local.momentum": {"uniform": [0, 0.9]}}
        assert len(drawn(mixed, {"search.samples": 100})[0]) == 100


class TestSeeds:
    def test_seeds_are_outermost(self):
        space = read_space({"seeds": [3, 1], "arms": [{"rounds": 1}, {"rounds": {"grid": [2, 3]}}]})
        assert [(t["seed"], t["rounds"]) for t in space.trials()] == [(3, 1), (3, 2), (3, 3), (1, 1), (1, 2), (1, 3)]

    @pytest.mark.parametrize("seed", [{"seed": 5}, {"arms": [{"rounds": 1}, {"seed": 0}]}])
    def test_a_seed_beside_seeds_would_be_ignored(self, seed):
        value = seed.get("seed", 0)
        message = f"seed={value}: has no effect beside seeds=[0, 1]; give one of them"
        assert refusal({"seeds": [0, 1]} | seed) == message


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"local.lr": {"grid": 0.1}}, "local.lr: grid needs a list of values, got 0.1"),
        ({"local.lr": {"uniform": [0.1, 1]}}, "local.lr: uniform needs search.kind=random"),
        ({"search.kind": "random", "a": {"uniform": [1, 2]}}, "search.samples: required for search.kind=random"),
        ({"a": {"uniform": [2, 1]}}, "a: uniform needs two numbers [low, high]"),
        ({"a": {"loguniform": [0, 1]}}, "a: loguniform needs two numbers"),
        ({"search.kind": "random", "search.samples": 1, "a": {"randint": [0.5, 2]}}, "a: randint needs two integers"),
        ({"search": {"sampels": 3}}, "search.sampels: no such key; did you mean search.samples?"),
        ({"search": "grid"}, "search='grid': expected a mapping"),
        ({"arms": ["fedavg"]}, "arms=['fedavg']: expected a list"),
        ({"seeds": 3}, "seeds=3: expected a list of integers"),
        ({"seeds": [1.5]}, "seeds=[1.5]: expected a list of integers"),
        ({"seeds": []}, "seeds and arms: expected lists with at least one entry"),
        ({"arms": [{"seed": 1}, {"seed": 2}]}, "seed: all arms share it; for several seeds, write seeds: [0, 1, 2]"),
        ({"seed": {"grid": [0, 1]}}, "seed: all arms share it; for several seeds, write seeds: [0, 1, 2]"),
    ],
)
def test_what_is_no_space_is_refused_in_one_line(space, message):
    assert refusal(space).startswith(message)


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_spaces_that_ship_are_valid(path):
    space = read_space(from_file(path))
    configs = [Config.read(values) for values in space.trials()]
    assert len(configs) == len(space.seeds) * sum(len(arm) for arm in space.arms)
    assert {config.experiment for config in configs} == {path.stem}
