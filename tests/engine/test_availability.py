"""Clients that drop out, are late or do less work: who replies, what they train, and the simulated clock."""

import dataclasses
import math

import pytest

from helpers.federations import Point, blueprint, new_server, quadratic, quadratics, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.ids import Moment
from rayfed.core.optim import SGD
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.clock import NO_CLOCK, Availability, Clock

CURVES = quadratics((1, 1), (1, 2), (1, 4), (1, 8))


def plan(algorithm=None, *, rounds=1, steps=1, clock=NO_CLOCK, **availability) -> Blueprint:
    """One exact step takes w to the client's own point, so that the server's w is the mean over those that reply."""
    return blueprint(
        algorithm or FedAvg(),
        CURVES,
        model=Point(),
        loss=quadratic,
        optimizer=SGD(lr=1.0),
        batch_size=1,
        rounds=rounds,
        local=Phase("train", steps=steps),
        availability=Availability(**availability),
        clock=clock,
    )


def test_a_dropped_client_is_missing_from_the_mean_and_the_costs():
    whole, _ = simulate(plan(), CURVES)
    assert whole.state["weights"]["w"].item() == (1 + 2 + 4 + 8) / 4
    seen = set()
    for seed in range(12):
        server, (record,) = simulate(dataclasses.replace(plan(dropout=0.4), seed=seed), CURVES)
        replied = sorted(server.fleet.states)
        assert record.sampled == 4
        assert record.cohort == len(replied) >= 1
        assert server.state["weights"]["w"].item() == pytest.approx(
            sum([1, 2, 4, 8][i] for i in replied) / len(replied)
        )
        assert record.bytes_up == {"weights": 4 * len(replied)}
        assert record.simulated_seconds is None
        seen.add(len(replied))
    assert {2, 3} <= seen  # 2.4 are expected


def test_the_probability_of_dropping_out():
    how = plan(dropout=0.3, rounds=600)
    server = new_server(how, CURVES)
    replied = sum(len(server.rounds.turn(number).clients) for number in range(1, 601))
    assert replied / 2400 == pytest.approx(0.7, abs=0.04)  # standard deviation 0.01


def test_the_clock_waits_for_the_slowest_or_until_the_deadline():
    """Three steps of 2 s times the client's speed, whose logarithm has a standard deviation of 0.5."""
    clock = {"steps": 3, "clock": Clock(step_seconds=2.0, speed_spread=0.5)}
    server, (record,) = simulate(plan(**clock), CURVES)
    speeds = [server.blueprint.clock.device(0, i).step_seconds / 2.0 for i in range(4)]
    assert record.simulated_seconds == record.clock_seconds == pytest.approx(6 * max(speeds))
    assert record.cohort == 4
    ranked = sorted(range(4), key=lambda i: speeds[i])
    deadline = 6 * (speeds[ranked[1]] + speeds[ranked[2]]) / 2  # two are in time
    server, (record,) = simulate(plan(**clock, deadline=deadline), CURVES)
    assert sorted(server.fleet.states) == sorted(ranked[:2])
    assert (record.cohort, record.sampled, record.simulated_seconds) == (2, 4, deadline)
    server, (record,) = simulate(plan(**clock, deadline=1e-3), CURVES)  # all are late: it takes the first that comes
    assert list(server.fleet.states) == ranked[:1]
    assert record.simulated_seconds == pytest.approx(6 * speeds[ranked[0]])


@pytest.mark.parametrize("key", ["step_seconds", "up_mbps"])
def test_speeds_and_bandwidths_are_log_normal_and_kept(key):
    clock = Clock(**{key: 3.0}, speed_spread=0.5)
    logs = [math.log(getattr(clock.device(0, i), key) / 3.0) for i in range(400)]
    assert sum(logs) / 400 == pytest.approx(0.0, abs=0.1)
    assert sum(value**2 for value in logs) / 400 == pytest.approx(0.25, abs=0.07)
    assert clock.device(0, 7) == clock.device(0, 7)


def test_the_clock_goes_on_and_counts_the_seconds_of_the_server():
    server, records = simulate(plan(rounds=3, clock=Clock(step_seconds=2.0, server_seconds=0.5)), CURVES)
    assert [record.clock_seconds for record in records] == [2.5, 5.0, 7.5]
    assert server.progress()["clock"] == 7.5
    assert {record.staleness_max for record in records} == {None}


@pytest.mark.parametrize("width", [1, 4])
def test_clients_train_between_the_least_work_and_all_of_it(width):
    """With steps of a tenth of the way, a client that takes k steps ends at a (1 − 0.9^k)."""
    how = dataclasses.replace(plan(steps=8, least_work=0.5), optimizer=SGD(lr=0.1), vmap_clients=width)
    steps = set()
    for seed in range(6):
        server, _ = simulate(dataclasses.replace(how, seed=seed), CURVES, points=("trained",))
        drawn = [how.availability.local_work(how.local, seed, Moment("round", 1), i).steps for i in range(4)]
        ends = [a * (1 - 0.9**k) for a, k in zip((1, 2, 4, 8), drawn, strict=True)]
        assert server.state["weights"]["w"].item() == pytest.approx(sum(ends) / 4, rel=1e-5)
        steps |= set(drawn)
    assert steps == {4, 5, 6, 7, 8}


def test_epochs_are_drawn_anew_in_every_round_and_only_in_rounds():
    availability = Availability(least_work=0.3)
    local = Phase("train", epochs=5)
    drawn = {r: availability.local_work(local, 0, Moment("round", r), 2).epochs for r in range(1, 40)}
    assert set(drawn.values()) == {2, 3, 4, 5}
    assert availability.local_work(local, 0, Moment("final", 40), 2) == local
    assert availability.local_work(local, 0, Moment("setup", 0), 2) == local


def test_scaffold_counts_the_steps_that_a_client_took():
    """After k steps from 0, the control variate is the mean gradient on the way, −a (1 − 0.9^k)/(0.1 k)."""
    how = dataclasses.replace(plan(Scaffold(), steps=8, least_work=0.5), optimizer=SGD(lr=0.1))
    server, _ = simulate(how, CURVES)
    for i, a in enumerate((1, 2, 4, 8)):
        k = how.availability.local_work(how.local, 0, Moment("round", 1), i).steps
        assert server.fleet.states[i]["c"]["w"].item() == pytest.approx(-a * (1 - 0.9**k) / (0.1 * k), rel=1e-4)
