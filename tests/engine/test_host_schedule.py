"""Schedules against a simulated clock: everything is done once, and hosts finish together."""

import heapq
import itertools

import numpy as np
import pytest

from rayfed.engine.host_schedule import IN_FLIGHT, Rates, Schedule, Unit


class Simulation:
    """Hosts that take `speeds` seconds per unit of cost, whatever the schedule believes.

    Every call of a host takes `call` seconds more, and `rates` are told what each chunk took.
    """

    def __init__(self, schedule, speeds, *, call=0.0, rates=None):
        self.schedule, self.speeds, self.now = schedule, speeds, 0.0
        self.call, self.rates, self.ends = call, rates, {}
        self.queues = {host: [] for host in speeds}
        self.busy = dict.fromkeys(speeds, 0.0)
        self.done, self.chunks, self.numbers, self.events = [], [], itertools.count(), []

    def send(self):
        for host in self.queues:
            while (over := self.schedule.all_sent, chunk := self.schedule.next(host, self.now))[1] is not None:
                assert not over, "the schedule had said that it had sent everything"
                self.chunks.append(chunk)
                self.queues[host].append(chunk)
                assert len(self.queues[host]) <= IN_FLIGHT
                if len(self.queues[host]) == 1:
                    self.work(host)

    def work(self, host):
        seconds = self.call + self.queues[host][0].cost * self.speeds[host]
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), self.queues[host][0]))

    def run(self):
        self.send()
        while not self.schedule.finished:
            self.now, _, chunk = heapq.heappop(self.events)
            host = chunk.host
            self.queues[host].remove(chunk)
            self.busy[host] += self.call + chunk.cost * self.speeds[host]
            self.ends[host] = self.now
            if self.rates is not None:
                self.rates.measured("kind", host, chunk.cost, chunk.elapsed(self.now))
            self.schedule.done(chunk, self.now)
            self.done += [client for unit in chunk.units for client in unit.clients]
            if self.queues[host]:
                self.work(host)
            self.send()
        assert self.schedule.all_sent
        return self


def units(costs):
    return [Unit((client,), cost=cost) for client, cost in enumerate(costs)]


def lognormal(count, seed):
    return np.random.default_rng(seed).lognormal(3, 1, count).round() + 1


@pytest.mark.parametrize("hosts", [1, 2, 3, 7])
@pytest.mark.parametrize("known", [True, False])
def test_every_unit_is_done_once(hosts, known):
    costs = lognormal(60, hosts)
    speeds = {host: 0.01 * (1 + host) for host in range(hosts)}
    simulation = Simulation(Schedule(units(costs), range(hosts), speeds if known else None), speeds).run()
    assert sorted(simulation.done) == list(range(60))


def test_the_most_costly_go_first_and_each_to_the_host_that_is_free_first():
    schedule = Schedule(units([4, 3, 3, 2, 2, 2]), range(2), {0: 1.0, 1: 1.0})
    assert schedule.predicted == {0: 8, 1: 8}
    slow = Schedule(units([4, 3, 3, 2, 2, 2]), range(2), {0: 1.0, 1: 3.0})
    assert slow.predicted == {0: 13, 1: 9}  # 4, 3, 2, 2, 2 and 3


@pytest.mark.parametrize(("hosts", "bound"), [(2, 1.02), (4, 1.02), (8, 1.05), (16, 1.35)])
def test_hosts_finish_together_where_clients_differ_in_size(hosts, bound):
    """100 of 10,000 clients with lognormal sizes, over 50 rounds: busiest host by mean host, without idle tails."""
    sizes = np.random.default_rng(0).lognormal(3, 1, 10_000)
    speeds = dict.fromkeys(range(hosts), 0.01)
    ratios = []
    for round in range(50):
        cohort = np.random.default_rng(round).choice(10_000, 100, replace=False)
        work = [Unit((int(client),), cost=float(sizes[client] // 10 + 1)) for client in cohort]
        simulation = Simulation(Schedule(work, range(hosts), speeds), speeds).run()
        ratios.append(max(simulation.busy.values()) / np.mean(list(simulation.busy.values())))
    assert np.mean(ratios) <= bound


@pytest.mark.parametrize(
    ("costs", "homes", "plans"),
    [
        ([5, 5, 5, 5], [1, 1, 0, 0], {0: [2, 3], 1: [0, 1]}),
        ([5, 5, 5, 5], [1, None, 1, 1], {0: [1, 2], 1: [0, 3]}),  # no host gets more for it
        ([3, 3, 2, 2, 1], [1, 0, 1, 0, 1], {0: [1, 3], 1: [0, 2, 4]}),
        ([4, 2, 2], [1, 1, 0], {0: [1, 2], 1: [0]}),
        ([4, 3, 2, 1], [None] * 4, {0: [0, 3], 1: [1, 2]}),
    ],
)
def test_clients_return_to_the_host_that_had_them_where_the_end_is_the_same(costs, homes, plans):
    given = [Unit((client,), cost=costs[client], home=home) for client, home in enumerate(homes)]
    schedule = Schedule(given, range(2))
    assert {host: sorted(unit.clients[0] for unit in plan) for host, plan in schedule._plans.items()} == plans
    ends = [Schedule(some, range(2), {0: 1.0, 1: 1.0}).predicted for some in (given, units(costs))]
    assert sorted(ends[0].values()) == sorted(ends[1].values())


def test_an_idle_host_takes_what_a_slow_one_was_not_sent():
    believed, real = {0: 1.0, 1: 1.0}, {0: 1.0, 1: 4.0}
    simulation = Simulation(Schedule(units([1] * 100), range(2), believed), real).run()
    assert sorted(simulation.done) == list(range(100))
    assert simulation.now < 150  # 200 if nothing moved, 80 if the speeds had been known


def test_chunks_never_hold_more_clients_than_fit_into_memory():
    schedule = Schedule(units([1] * 1000), [0], {0: 1.0})
    assert max(len(chunk.clients) for chunk in Simulation(schedule, {0: 1.0}).run().chunks) == 64


def test_the_last_chunk_is_not_a_crumb():
    chunks = Simulation(Schedule(units([1] * 24), [0], {0: 0.01}), {0: 0.01}).run().chunks
    assert [len(chunk.units) for chunk in chunks] == [12, 12]  # and not 12, 10, 2


def test_hosts_finish_together_where_every_call_costs_time():
    """The fixed cost of calls must not make a host with a short chunk look slow, round after round."""
    rates, speeds = Rates(), {0: 0.0044, 1: 0.004}
    for _ in range(20):
        rates.begin("kind")
        schedule = Schedule(units([1] * 500), speeds, rates.of("kind", speeds), most_clients=1000)
        ends = list(Simulation(schedule, speeds, call=0.005, rates=rates).run().ends.values())
    assert max(ends) / np.mean(ends) < 1.01  # 1.08 where every chunk counted the same


def test_short_blocks_come_last_in_a_chunk():
    blocks = [Unit((4,), cost=9), Unit((0, 1), cost=2), Unit((2, 3), cost=2)]
    schedule = Schedule(blocks, [0])
    chunks = Simulation(schedule, {0: 1.0}).run().chunks
    assert [chunk.clients for chunk in chunks] == [[4], [0, 1], [2, 3]]
    assert schedule.next(0, 0.0) is None
    everything = Schedule([Unit((4,), cost=1), Unit((0, 1), cost=1), Unit((2, 3), cost=4)], [0], {0: 1e-9})
    assert everything.next(0, 0.0).clients == [2, 3, 0, 1, 4]


class TestRates:
    def test_nothing_is_known_before_the_first_measurement(self):
        assert Rates().of("kind", [0, 1]) is None

    def test_the_last_exchanges_count_most(self):
        rates = Rates()
        for seconds in (10, 20, 40):
            rates.begin("kind")
            rates.measured("kind", 0, 10, seconds)
        assert rates.of("kind", [0]) == {0: (10 / 4 + 20 / 2 + 40) / (10 / 4 + 10 / 2 + 10)}

    def test_a_host_that_is_not_needed_keeps_its_estimate(self):
        rates = Rates()
        rates.measured("kind", 1, 10, 20)
        for _ in range(2000):
            rates.begin("kind")
            rates.measured("kind", 0, 10, 10)
        assert rates.of("kind", [0, 1]) == {0: 1.0, 1: 2.0}

    def test_a_short_chunk_that_took_long_counts_little(self):
        rates = Rates()
        rates.begin("kind")
        rates.measured("kind", 0, 100, 10.0)
        rates.measured("kind", 0, 1, 1.0)
        assert rates.of("kind", [0]) == {0: 11 / 101}

    def test_new_hosts_have_the_mean_speed_and_kinds_are_apart(self):
        rates = Rates()
        rates.measured("kind", 0, 1, 1.0)
        rates.measured("kind", 1, 1, 3.0)
        assert rates.of("kind", [0, 1, 2]) == {0: 1.0, 1: 3.0, 2: 2.0}
        assert rates.of("other", [0]) is None
