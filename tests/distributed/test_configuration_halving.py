"""Early stopping compares configurations over the same seeds, whatever the seeds' validation data are like."""

import itertools

import pytest

from rayfed.distributed.configuration_halving import ConfigurationHalving, configuration_effects
from rayfed.experiments.space import Search

ROUNDS = 27
EFFECTS = {f"mu={mu}": 0.60 + 0.02 * mu for mu in range(9)}
"""The validation accuracy of nine configurations at a seed of no difficulty; mu=8 is best."""
DIFFICULTY = {0: -0.20, 1: 0.05}
"""Seed 0 has harder validation data: all its trials are below all those of seed 1."""


def search(**options) -> Search:
    return Search(scheduler="asha", **{"grace_rounds": 1, "reduction_factor": 3.0, **options})


def finished(order: list[tuple[str, int]], at_once: int = 1) -> set[tuple[str, int]]:
    """The trials that run to their end if `at_once` of them take turns, in this order."""
    scheduler = ConfigurationHalving(search(), ROUNDS)
    waiting = list(order)
    running: dict[tuple[str, int], int] = {}
    done = set()
    while waiting or running:
        while waiting and len(running) < at_once:
            running[waiting.pop(0)] = 0
        for trial in list(running):
            running[trial] += 1
            configuration, seed = trial
            gain = EFFECTS[configuration] + DIFFICULTY[seed] + running[trial] / 1000
            ends = scheduler.decide(configuration, seed, running[trial], gain) == "STOP"
            if running[trial] == ROUNDS and not ends:
                done.add(trial)
                ends = True
            if ends:
                del running[trial]
    return done


@pytest.mark.parametrize("at_once", [1, 2, 18])
@pytest.mark.parametrize("worst_first", [False, True])
def test_the_best_configuration_finishes_with_both_seeds(at_once: int, worst_first: bool) -> None:
    names = sorted(EFFECTS, reverse=not worst_first)
    seed_by_seed = [(name, seed) for seed, name in itertools.product(DIFFICULTY, names)]
    assert {("mu=8", 0), ("mu=8", 1)} <= finished(seed_by_seed, at_once)
    by_configuration = [(name, seed) for name, seed in itertools.product(names, DIFFICULTY)]
    assert {("mu=8", 0), ("mu=8", 1)} <= finished(by_configuration, at_once)


def test_a_configuration_that_is_stopped_is_stopped_at_all_seeds() -> None:
    names = sorted(EFFECTS, reverse=True)  # the best first, so that the others stop at once
    done = finished([(name, seed) for seed, name in itertools.product(DIFFICULTY, names)], 18)
    seeds = {name: {seed for other, seed in done if other == name} for name, _ in done}
    assert set(map(frozenset, seeds.values())) == {frozenset({0, 1})}
    assert len(seeds) < len(EFFECTS)


def test_a_hard_seed_is_no_fault_of_a_configuration() -> None:
    """a leads at both seeds, and has been scored at the hard one alone so far."""
    scheduler = ConfigurationHalving(search(reduction_factor=2.0), ROUNDS)
    assert scheduler.decide("b", 0, 1, 0.50) == "CONTINUE"
    assert scheduler.decide("b", 1, 1, 0.80) == "CONTINUE"
    assert scheduler.decide("a", 0, 1, 0.55) == "CONTINUE"
    assert scheduler.decide("c", 1, 1, 0.79) == "STOP"
    assert scheduler.decide("c", 0, 1, 0.99) == "STOP"  # with all its seeds


def test_effects_by_hand() -> None:
    """Rows a: 1 and 3, b: 2 and 4 at seeds 0 and 1; c has only seed 1, with 4: as good as b."""
    effects = configuration_effects({("a", 0): 1.0, ("a", 1): 3.0, ("b", 0): 2.0, ("b", 1): 4.0, ("c", 1): 4.0})
    assert effects["b"] - effects["a"] == pytest.approx(1.0)
    assert effects["c"] - effects["b"] == pytest.approx(0.0)


def test_rounds_without_a_score_decide_nothing() -> None:
    scheduler = ConfigurationHalving(search(), ROUNDS)
    assert scheduler.decide("a", 0, 1, 0.9) == "CONTINUE"
    for gain in (None, float("nan")):
        assert scheduler.decide("b", 0, 1, gain) == "CONTINUE"
