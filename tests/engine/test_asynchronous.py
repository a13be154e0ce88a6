"""Asynchronous rounds: their timetable, the weights of stale replies, training ahead of the clock, and refusals."""

import copy
import dataclasses
import heapq
import itertools
import math

import pytest
import torch

from helpers import reference
from helpers.checkpoints import CheckpointRecorder
from helpers.federations import Net, Point, blobs, blueprint, new_server, quadratic, quadratics, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.apple import APPLE
from rayfed.algorithms.dp_fedbn import DPFedBN
from rayfed.algorithms.fada import FADA
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.fedprox import FedProx
from rayfed.algorithms.scaffold import Scaffold
from rayfed.algorithms.server_optimizers import FedAdam, FedAvgM
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD
from rayfed.core.rng import generator
from rayfed.core.round_schedule import Buffered
from rayfed.engine.checkpoint import Checkpointer
from rayfed.engine.clock import Availability, Clock, Device
from rayfed.engine.host import LocalFleet
from rayfed.engine.timetable import timetable
from rayfed.experiments.checks import check_trial, settled
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.device_profile import read_profile

EQUAL = blobs(8, sizes=(40,))
SEVERAL = blobs(6, sizes=(20, 26, 33, 41))
SPREAD = Clock(step_seconds=1.0, speed_spread=1.0)


def speeds(*seconds):
    """A clock on which clients take these seconds per step."""
    return Clock(profile=tuple(Device(each) for each in seconds))


@pytest.mark.parametrize("cohort", [3, 8])
@pytest.mark.parametrize("algorithm", [FedAvg, FedProx, FedBN, FedAvgM, FedAdam, Scaffold])
def test_equal_speeds_and_a_full_buffer_are_the_rounds_of_a_cohort(algorithm, cohort):
    how = blueprint(algorithm(), EQUAL, model=Net(), rounds=3, cohort=cohort)
    asynchronous = dataclasses.replace(
        how, clock=Clock(step_seconds=1.0), buffered=Buffered(concurrency=cohort, buffer=cohort)
    )
    (first, of_rounds), (second, of_updates) = (
        simulate(one, EQUAL, points=("downloaded",)) for one in (how, asynchronous)
    )
    assert first.state_hash() == second.state_hash()
    for a, b in zip(of_rounds, of_updates, strict=True):
        assert (a.bytes_down, a.bytes_up, a.cohort, a.scores) == (b.bytes_down, b.bytes_up, b.cohort, b.scores)
        assert (b.staleness_mean, b.staleness_max, b.waiting) == (0.0, 0, 0)


def hand_made(schedule, rounds, **changes):
    """Three clients with optima 1, 2, 4 that take 1, 2, 5 s for a step, which takes them to their optimum."""
    people = quadratics((1, 1), (1, 2), (1, 4))
    values = {"optimizer": SGD(lr=1.0), "batch_size": 1, "local": Phase("train", steps=1), "clock": speeds(1, 2, 5)}
    how = blueprint(
        FedAvg(), people, model=Point(), loss=quadratic, rounds=rounds, buffered=schedule, **(values | changes)
    )
    return simulate(how, people)


def test_three_clients_by_hand_with_fedasync():
    """At 2 s, the second reply of client 0 comes before that of client 1, and the latter is two updates late."""
    server, records = hand_made(Buffered(concurrency=3, buffer=1, alpha=0.6), 8)
    whose, stale = [0, 0, 1, 0, 0, 1, 0, 2], [0, 0, 2, 1, 0, 2, 1, 7]
    assert [update.clients for update in server.rounds.updates] == [(client,) for client in whose]
    assert [record.clock_seconds for record in records] == [1, 2, 2, 3, 4, 4, 5, 5]
    assert [record.simulated_seconds for record in records] == [1, 1, 0, 1, 1, 0, 1, 0]
    assert [record.staleness_max for record in records] == stale
    w = 0.0
    for client, late in zip(whose, stale, strict=True):
        alpha = 0.6 / math.sqrt(1 + late)
        w = (1 - alpha) * w + alpha * [1, 2, 4][client]
    assert server.state["weights"]["w"].item() == pytest.approx(w, rel=1e-6)


def test_three_clients_by_hand_with_fedbuff():
    """Updates: (0, 1) at 2 s, (0, 1) at 4 s, (0, 2) at 5 s, where client 2 has started from 0 and is two updates late.

    Client 0 cannot start again while its reply waits, so it is idle from 1 s to 2 s and from 3 s to 4 s.
    """
    server, records = hand_made(Buffered(concurrency=3, buffer=2), 3)
    assert [record.clock_seconds for record in records] == [2, 4, 5]
    assert [(record.staleness_mean, record.staleness_max) for record in records] == [(0, 0), (0, 0), (1, 2)]
    first = (1 + 2) / 2
    second = first + (1 - first) / 2 + (2 - first) / 2
    third = second + (1 - second) / 2 + (4 - 0) / 2 / math.sqrt(3)
    assert server.state["weights"]["w"].item() == pytest.approx(third, rel=1e-6)


def test_replies_that_are_too_stale_are_dropped_and_their_clients_keep_their_state():
    server, records = hand_made(Buffered(concurrency=3, buffer=2, max_staleness=1), 3)
    assert [record.cohort for record in records] == [2, 2, 2]
    assert [record.sampled for record in records] == [2, 2, 3]  # client 2 comes at 5 s, and client 1 at 6 s
    assert records[-1].clock_seconds == 6
    assert 2 not in server.fleet.states


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"weighting": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"alpha": 0.5}, [0.5 / math.sqrt(1 + late) for late in range(6)]),
        ({"a": 2.0}, [1, 1 / 4, 1 / 9, 1 / 16, 1 / 25, 1 / 36]),
        ({"weighting": "hinge"}, [1, 1, 1, 1, 1, 1 / 11]),
        ({"weighting": "hinge", "a": 1.0, "b": 2, "alpha": 0.8}, [0.8, 0.8, 0.8, 0.4, 0.8 / 3, 0.2]),
    ],
)
def test_weights_by_staleness(schedule, expected):
    buffered = Buffered(concurrency=2, buffer=1, **schedule)
    assert [buffered.weight(late) for late in range(6)] == pytest.approx(expected)


# A reference in plain PyTorch


def by_hand(people, model, schedule, seconds, *, rounds, steps, server_seconds=0.0):
    """Return the times and clients of the updates and the final model of a serial loop over a heap of events."""
    shares = [len(client.train) for client in people.clients]
    count, now, version, queue, buffer = len(shares), 0.0, 0, [], {}
    versions, updates, rng = [copy.deepcopy(model)], [], generator(0, "cohort", round=1)
    while version < rounds:
        training = {client for _, client, _ in queue}
        idle = [client for client in range(count) if client not in training and client not in buffer]
        free = schedule.concurrency - len(queue)
        chosen = idle if free >= len(idle) else sorted(rng.choice(idle, free, replace=False).tolist())
        for client in chosen:
            heapq.heappush(queue, (now + seconds[client], client, version))
        now = max(now, queue[0][0])
        while queue and queue[0][0] <= now and len(buffer) < schedule.buffer:
            _, client, start = heapq.heappop(queue)
            if schedule.max_staleness is None or version - start <= schedule.max_staleness:
                trained = reference.descend(versions[start], *reference.data(people, client), steps)
                buffer[client] = start, trained
        if len(buffer) < schedule.buffer:
            continue
        present = versions[-1]
        after, total = copy.deepcopy(present), sum(shares[client] for client in buffer)
        with torch.no_grad():
            for name, value in after.named_parameters():
                old = value.clone()
                for client, (start, trained) in buffer.items():
                    base = present if schedule.adds_models else versions[start]
                    change = trained.get_parameter(name) - base.get_parameter(name)
                    weight = schedule.alpha * shares[client] / total / math.sqrt(1 + version - start)
                    value += weight * change
                assert not torch.equal(old, value)
        now += server_seconds
        version += 1
        updates.append((now, tuple(sorted(buffer))))
        versions.append(after)
        buffer, rng = {}, generator(0, "cohort", round=version + 1)
    return updates, versions[-1]


@pytest.mark.parametrize(
    "schedule",
    [
        Buffered(concurrency=6, buffer=1, alpha=0.7),
        Buffered(concurrency=3, buffer=1, max_staleness=2),
        Buffered(concurrency=4, buffer=2),
        Buffered(concurrency=5, buffer=3, adds="models", max_staleness=1),
    ],
    ids=["FedAsync", "FedAsync-dropped", "FedBuff", "models"],
)
def test_a_serial_loop_gives_the_same_timetable_and_the_same_weights(schedule):
    each, steps, model = (0.3, 1.0, 2.2, 0.7, 5.1, 1.3), 2, Net(batch_norm=False)
    sent = sum(p.numel() * 4 for p in model.parameters())
    devices = [Device(one, up_mbps=0.01, down_mbps=0.02) for one in each]
    seconds = [steps * one + 8e-6 * sent * (100 + 50) for one in each]
    how = reference.plan(
        FedAvg(),
        SEVERAL,
        model,
        steps=steps,
        rounds=12,
        clock=Clock(profile=tuple(devices), server_seconds=0.1),
        buffered=schedule,
    )
    server, records = simulate(how, SEVERAL)
    expected, final = by_hand(SEVERAL, model, schedule, seconds, rounds=12, steps=steps, server_seconds=0.1)
    assert [update.clients for update in server.rounds.updates] == [clients for _, clients in expected]
    assert [record.clock_seconds for record in records] == pytest.approx([time for time, _ in expected], rel=1e-12)
    for name, value in final.named_parameters():
        assert torch.allclose(server.state["weights"][name], value, atol=1e-6, rtol=0)
    assert max(record.staleness_max for record in records) > 0


# Training ahead of the clock


def test_clients_under_way_train_together_and_nothing_is_trained_in_vain():
    how = dataclasses.replace(
        blueprint(FedBN(), EQUAL, model=Net(), rounds=24),
        clock=SPREAD,
        buffered=Buffered(concurrency=6, buffer=1),
    )
    fleet = LocalFleet(how, EQUAL)
    waves, exchange = [], fleet.exchange
    fleet.exchange = lambda request, *sent: waves.append(len(request.clients)) or exchange(request, *sent)
    server = new_server(how, EQUAL, fleet, points=("downloaded",))
    together = list(server.run())
    assert sum(waves) == 24  # as many as replies
    assert len(waves) <= 24 / 3  # at least three at a time on average
    # Where trained models are scored, every client trains for its own update.
    other, alone = simulate(how, EQUAL, points=("downloaded", "trained"))
    assert other.state_hash() == server.state_hash()
    for a, b in zip(together, alone, strict=True):  # each client is scored with the state that it has on the clock
        assert a.scores == [score for score in b.scores if score.point == "downloaded" or score.split == "train"]


@pytest.mark.parametrize("algorithm", [FedBN, Scaffold, FedAdam])
def test_a_resumed_simulation_ends_with_the_same_bits_also_with_more_rounds(tmp_path, algorithm):
    how = dataclasses.replace(
        blueprint(algorithm(), EQUAL, model=Net(), rounds=10),
        clock=SPREAD,
        buffered=Buffered(concurrency=5, buffer=2, max_staleness=3),
    )
    whole, records = simulate(how, EQUAL)
    recorder = CheckpointRecorder(str(tmp_path), "e")

    def go_on(rounds, last):
        plan = dataclasses.replace(how, rounds=rounds)
        server = new_server(plan, EQUAL, points=())
        saver = Checkpointer(server, recorder, "t", "c", "0")
        if saved := recorder.saved("t"):
            saver.restore(saved)
        for record in server.run():
            saver.save()
            if record.round == last:
                break
        return server

    for last in (2, 5):
        go_on(6, last)
    go_on(6, None)
    written = {path.name for path in tmp_path.glob("e/checkpoints/t/version_*")}
    assert len({name.partition("-")[0] for name in written}) == len(written)  # each version is written once
    assert go_on(10, None).state_hash() == whole.state_hash()
    assert records[-1].clock_seconds == whole.rounds.updates[-1].seconds


# Clocks and devices


def test_a_timetable_does_not_depend_on_how_far_it_is_read_and_keeps_its_bounds():
    schedule = Buffered(concurrency=7, buffer=3, max_staleness=2)

    def end(client, round, cohort, start):
        return start + math.exp(generator(3, "speed", client=client).normal())

    updates = list(itertools.islice(timetable(schedule, 11, end, seed=4), 40))
    assert updates == list(itertools.islice(timetable(schedule, 11, end, seed=4), 60))[:40]
    assert [update.seconds for update in updates] == sorted(update.seconds for update in updates)
    for number, update in enumerate(updates):
        assert len(update.clients) == 3
        assert all(0 <= number - start <= 2 for start in update.starts)
        assert all(number - start > 2 for _, start in update.dropped)
        assert update.under_way <= 7
    started = {(client, number) for number, update in enumerate(updates) for client in update.starting}
    assert all(job in started for update in updates for job in zip(update.clients, update.starts, strict=True))
    assert len({client for update in updates for client in update.starting}) == 11


def test_bandwidths_count_the_bytes_of_both_directions():
    """860 bytes each way: 0.344 s down and 0.688 s up."""
    how = dataclasses.replace(
        blueprint(Scaffold(), EQUAL, model=Net(batch_norm=False), rounds=1),
        clock=Clock(step_seconds=1.0, up_mbps=0.01, down_mbps=0.02),
        local=Phase("train", steps=2),
    )
    _, (record,) = simulate(how, EQUAL)
    down, up = (sum(sizes.values()) / 8 for sizes in (record.bytes_down, record.bytes_up))
    assert record.clock_seconds == pytest.approx(2 + 8e-6 * (down / 0.02 + up / 0.01))


def test_a_client_pauses_while_it_is_away():
    """It is there from 1 to 3 s and from 4 to 5 s of every 10 s, the last time of the profile."""
    there = Device(1.0, available=((1, 3), (4, 5)))
    clock = Clock(profile=(there, Device(2.0, available=((0, 10),))))
    assert [
        clock.end(there, start, steps, 0, 0) for start, steps in ((0, 1), (0, 2), (0, 3), (2, 2), (0, 4), (17, 1))
    ] == [
        *(2, 3, 5, 5, 12, 22),
    ]
    assert clock.end(clock.profile[1], 9.0, 1, 0, 0) == 11


def test_a_client_that_is_hardly_there_ends_within_a_cycle_of_its_time():
    """It is there for half a second of every 10 s and works for 10⁶ s, the end of its cycle 2·10⁶."""
    there = Device(1.0, available=((0, 0.5),))
    clock = Clock(profile=(there, Device(1.0, available=((0, 10),))))
    assert abs(clock.end(there, 0.0, 10**6, 0, 0) - 2e7) <= 10
    assert clock.end(there, 0.0, 10**300, 0, 0) == pytest.approx(2e301)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_profiles(tmp_path, suffix):
    import pandas as pd

    path = str(tmp_path / f"devices.{suffix}")
    table = pd.DataFrame(
        {
            "client": [7, 3, 5],
            "steps_per_second": [2.0, 4.0, 10.0],
            "up_mbps": [1.0, None, 3.0],
            "available": ["0-3.5 4-8", None, None],
        }
    )
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    assert read_profile(path, [3, 7]) == (
        Device(0.25),
        Device(0.5, up_mbps=1.0, available=((0.0, 3.5), (4.0, 8.0))),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps_per_second\n1\n2\n", "has no row for client 2, as for 1 of 3 clients"),
        ("client,steps_per_second\n0,1\n2,2\n", "has no row for client 1, as for 1 of 3 clients"),
        ("steps_per_second\n1\n0\n2\n", "steps_per_second of client 1 is 0; must be more than 0"),
        ("steps_per_second\n1\nx\n2\n", "steps_per_second of client 1 is x; must be more than 0"),
        ("steps_per_second,up_mbps\n1,1\n1,-2\n2,1\n", "up_mbps of client 1 is -2; must be more than 0"),
        ("up_mbps\n1\n1\n2\n", "has no column steps_per_second"),
        ("steps_per_second,speed\n1,1\n1,1\n2,2\n", "unknown column speed; known: client, steps_per_second"),
        ("client,steps_per_second\n0,1\n0,2\n1,1\n2,1\n", "has several rows for client 0"),
        ("steps_per_second\n1\n1\n2\n3\n", "has 4 rows for 3 clients; name them in a column client"),
        ("steps_per_second,available\n1,0-2\n1,3-2\n2,0-1\n", "available of client 1 is '3-2'; give ascending seconds"),
        ("steps_per_second,available\n1,0-nan\n1,0-1\n2,0-1\n", "available of client 0 is '0-nan'; give ascending"),
        ("steps_per_second,available\n1,0-inf\n1,0-1\n2,0-1\n", "available of client 0 is '0-inf'; give ascending"),
        ("steps_per_second\n1\n1e-320\n2\n", "steps_per_second of client 1 is 1e-320; must be at least 1e-09"),
        ("", "cannot be read as CSV or Parquet (No columns to parse from file)"),
    ],
)
def test_profiles_that_are_refused(tmp_path, content, message):
    path = tmp_path / "devices.csv"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        read_profile(str(path), [0, 1, 2])
    assert str(error.value).startswith(f"clock.profile={path}: {message}")


class NeedsAll(FedAvg):
    def check(self, problem):
        if not problem.full_participation:
            raise UsageError("cohort: leave it out")


def test_what_cannot_be_asynchronous_is_refused():
    people, clock, some = blobs(4), Clock(step_seconds=1.0), {"concurrency": 3, "buffer": 2}
    for algorithm, changes, message in (
        (FADA(), {}, "schedule.name=buffered: algorithm.name=fada has several exchanges; use"),
        (NeedsAll(), {}, "schedule.name=buffered: algorithm.name=fedavg needs every client in every round; use"),
        (DPFedBN(), {}, "schedule.name=buffered: algorithm.name=dp_fedbn divides its privacy budget"),
        (APPLE(), {}, "schedule.name=buffered: algorithm.name=apple has several exchanges"),
        (FedAvg(), {"clock": Clock()}, "schedule.name=buffered: needs a clock; give clock.step_seconds, such as 1"),
        (FedAvg(), {"buffered": Buffered(concurrency=5, buffer=1)}, "schedule.concurrency=5: there are 4 clients"),
        (FedAvg(), {"vmap_clients": 2}, "schedule.name=buffered: clients start from different models, so they train"),
        (FedAvg(), {"availability": Availability(dropout=0.1)}, "schedule.name=buffered: takes all replies; leave"),
        (FedAvg(), {"availability": Availability(deadline=3)}, "schedule.name=buffered: takes all replies; leave out"),
    ):
        how = blueprint(algorithm, people, **({"clock": clock, "buffered": Buffered(**some), "cohort": 2} | changes))
        with pytest.raises(UsageError) as error:
            check_trial(how, people)
        assert str(error.value).startswith(message)
    with pytest.raises(UsageError, match=r"^clock: bandwidths need a method with one exchange, and algorithm.name="):
        check_trial(blueprint(FADA(), people, clock=Clock(up_mbps=1.0)), people)
    with pytest.raises(UsageError, match=r"^schedule.buffer=4: only schedule.concurrency=3 clients train at a time"):
        Buffered(concurrency=3, buffer=4)
    auto = blueprint(FedAvg(), people, clock=clock, buffered=Buffered(**some), vmap_clients=None)
    assert settled(Trial(auto, people)).blueprint.vmap_clients == 1
