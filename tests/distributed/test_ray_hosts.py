"""Hosts as Ray actors: bit for bit what one process computes, for every algorithm; errors arrive; resources are kept.

Starting an actor takes seconds, most of it the import of torch. So all algorithms share one set of actors, which take
up one simulation after the other, and only the way through `rayfed.run` starts its own.
"""

import contextlib
import dataclasses
import functools
import os
import random
import re
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pandas as pd
import pytest
import ray
import torch

import rayfed
from helpers import algorithm_cases, federations
from helpers.algorithm_cases import SIX, everything, sampled_plan
from helpers.federations import Busy, Net, blobs, blueprint
from helpers.final_weights import assert_as_recorded
from helpers.ray_processes import actor_names
from helpers.ray_session import start_ray
from helpers.slow import slow_but
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import Diverged, HostLost
from rayfed.core.ids import Moment
from rayfed.core.round_schedule import Buffered
from rayfed.core.trees import state_hash
from rayfed.distributed.host_actor import HostMethods, kept, pack, unpack
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.ray_fleet import RayFleet, RayStates
from rayfed.engine.clock import Clock
from rayfed.engine.fleet import ExchangeRequest
from rayfed.engine.host import LocalFleet
from rayfed.engine.host_schedule import Rates, Schedule
from rayfed.engine.server import Evaluation, Server
from rayfed.metrics.heterogeneity import GradientNorm

pytestmark = pytest.mark.ray
PARAMETERS = (6 + 1) * 12 + (12 + 1) * 8 + (8 + 1) * 3  # of `Net`


class SharedFleet(RayFleet):
    """A `RayFleet` on processes that are there already. With a `seed`, its schedules are random ones."""

    def __init__(self, plan, population, pool, hosts, *, seed=None):
        self.random = None if seed is None else random.Random(seed)
        some = SimpleNamespace(actors=pool.actors[:hosts], bundles=pool.bundles[:hosts])
        super().__init__(plan, population, sent=ray.put(plan), device=torch.device("cpu"), pool=some)

    def _schedule(self, units, kind):
        schedule = super()._schedule(units, kind)
        return schedule if self.random is None else RandomSchedule(schedule, self.random)


class RandomSchedule(Schedule):
    """Sends any unit to any host, in any order."""

    def __init__(self, schedule, random):
        self.random = random
        super().__init__(schedule.units, schedule.free, schedule.rates)

    def __post_init__(self):
        super().__post_init__()
        units = list(self.units)
        self.random.shuffle(units)
        for plan in self._plans.values():
            plan.clear()
        for unit in units:
            self._plans[self.random.choice(list(self._plans))].append(unit)

    def _front(self, host):
        return [self._plans[host].popleft() for _ in range(self.random.randint(1, len(self._plans[host])))]


@pytest.fixture(scope="module", autouse=True)
def session():
    for module in (sys.modules[__name__], federations, algorithm_cases):  # which workers cannot import
        ray.cloudpickle.register_pickle_by_value(module)
    start_ray()


@pytest.fixture(scope="module")
def pool(session):
    made = HostPool([{}] * 5, None, name="fedavg-seed0")
    yield made
    made.close()


def test_the_dashboard_names_hosts_after_their_trial(pool):
    ray.get([actor.__ray_ready__.remote() for actor in pool.actors])
    assert {"fedavg-seed0 host 0", "fedavg-seed0 host 1"} <= actor_names("RayHost")


class Outcome(NamedTuple):
    state: dict[str, Any]
    state_hash: str
    rounds: list[tuple]
    scores: list[list]


def outcome(plan, people, fleet, points=None):
    """Return the final state, its hash, the rounds with their cohorts and bytes by field, and the scores."""
    points = points or tuple(dict.fromkeys((plan.algorithm.traits.default_eval_point, "trained")))
    server = Server(plan, people, fleet, Evaluation(every=2, points=points))
    records = list(server.run())
    rounds = [
        (r.round, r.cohort, dict(sorted(r.bytes_down.items())), dict(sorted(r.bytes_up.items()))) for r in records
    ]
    return Outcome(everything(server), server.state_hash(), rounds, [sorted(r.scores) for r in records])


HOSTED = {
    *("adcol", "feddebias", "gen_afl", "fed_irm", "vm", "fraug", "dbe"),
    *("fedavg", "scaffold", "fedbn", "ditto", "apple", "fedproto", "moon", "fedgen", "dp_fedbn"),
}
"""The methods of the papers, and others that send or keep something of their own."""


@functools.cache
def outcome_in_process(name):
    plan, people = sampled_plan(name)
    return outcome(plan, people, LocalFleet(plan, people))


@pytest.mark.parametrize(
    ("hosts", "dealt"), [(3, "at random"), *(pytest.param(n, "as planned", marks=pytest.mark.slow) for n in (1, 2, 4))]
)
@pytest.mark.parametrize("name", slow_but(HOSTED, {name: name for name in sorted(ALGORITHMS)}))
def test_any_number_of_hosts_computes_the_same(name, hosts, dealt, pool):
    plan, people = sampled_plan(name)
    expected = outcome_in_process(name)
    seed = hash(name) if dealt == "at random" else None
    result = outcome(plan, people, SharedFleet(plan, people, pool, hosts, seed=seed))
    assert result.state_hash == expected.state_hash, f"{hosts} hosts (seed {seed}) end with other bits"
    assert result.rounds == expected.rounds
    assert result.scores == expected.scores


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_final_weights_of_sampled_clients_are_those_recorded(name):
    assert_as_recorded("sampled", name, outcome_in_process(name).state)


def test_a_measured_number_of_clients_at_once_is_the_same_on_all_hosts(pool):
    """Steps are slow for any number, so the cohort of six is cut in two blocks, one for each host."""
    plan = blueprint(Busy(), SIX, vmap_clients=None)
    fleet = SharedFleet(plan, SIX, pool, 2)
    measured, given = outcome(plan, SIX, fleet), dataclasses.replace(plan, vmap_clients=3)
    assert fleet.vmap_clients == 3
    assert measured[1:] == outcome(given, SIX, LocalFleet(given, SIX))[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneByOneThere(Busy):
    """Busy, but a process of Ray cannot train several clients at once."""

    there: str = ""  # Ray's id of the process

    def step(self, ctx, work, down, batch):
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() == self.there:
            float(batch.x.sum())  # which torch.vmap refuses
        return super().step(ctx, work, down, batch)


def test_the_least_number_of_clients_at_once_counts_among_kinds_of_hosts(pool):
    """Two hosts share the memory of this machine, but one reserves it whole: they are of two kinds."""
    weak = pool.actors[1]
    plan = blueprint(OneByOneThere(there=weak._actor_id.hex()), SIX, vmap_clients=None)
    unlike = SimpleNamespace(actors=pool.actors, bundles=[{"CPU": 1}, {"CPU": 4}])
    fleet = SharedFleet(plan, SIX, unlike, 2)
    measured, given = outcome(plan, SIX, fleet), dataclasses.replace(plan, vmap_clients=1)
    assert fleet.vmap_clients == 1
    assert measured[1:] == outcome(given, SIX, LocalFleet(given, SIX))[1:]


def end_alike(plan, people, fleet, points=None):
    """Check that `fleet` computes what this process does, and return its outcome."""
    there = outcome(plan, people, fleet, points)
    assert there[1:] == outcome(plan, people, LocalFleet(plan, people), points)[1:]
    return there


@pytest.mark.parametrize("hosts", [1, 2])
def test_asynchronous_rounds_end_with_the_same_bits(hosts, pool):
    schedule = {"clock": Clock(step_seconds=1.0, speed_spread=1.0), "buffered": Buffered(concurrency=4, buffer=1)}
    for algorithm, points in ((Scaffold(), ("downloaded",)), (FedBN(), ("downloaded", "trained"))):
        plan = blueprint(algorithm, SIX, rounds=8, **schedule)
        end_alike(plan, SIX, SharedFleet(plan, SIX, pool, hosts, seed=hosts), points)


@pytest.mark.parametrize("policy", ["local", "local_statistics", "frozen"])
def test_with_every_batch_norm_policy(policy, pool):
    plan = blueprint(FedAvg(), SIX, batch_norm=policy, cohort=3)
    end_alike(plan, SIX, SharedFleet(plan, SIX, pool, 3), ("downloaded", "adapted"))


def test_more_hosts_than_clients_whose_states_are_kept_without_what_they_arrived_with(pool):
    plan = blueprint(Scaffold(), SIX, rounds=1, cohort=3)
    fleet = SharedFleet(plan, SIX, pool, 4)
    end_alike(plan, SIX, fleet)
    assert len(fleet.states) == 3  # clients that never trained have no state
    messages = list(fleet.states.sent(fleet.states)[0].values())
    assert len(messages) == 3
    parts = [part for message in messages for part in message.data]
    assert all(part.flags.owndata for part in parts)  # a view would keep the sum of the models


def test_states_of_any_size_arrive_with_their_clients():
    states = RayStates(torch.device("cpu"))
    sizes = {0: 5000, 1: 3, 2: 5000, 3: 0}  # 5000 floats are an object of their own
    for client, size in sizes.items():
        states.commit({client: kept(pack({"w": torch.full((size,), float(client))}))}, version=10 + client)
    small, large = states.sent((3, 2, 7, 1, 0))  # client 7 has no state
    assert list(small) == [3, 2, 1, 0]
    large = iter(ray.get(large))
    arrived = {client: unpacked(state or next(large)) for client, state in small.items()}
    assert next(large, None) is None
    assert {client: states[client]["w"].tolist() for client in states} == arrived
    assert arrived == {client: [float(client)] * sizes[client] for client in (3, 2, 1, 0)}


def unpacked(state):
    return unpack(state, torch.device("cpu"))["w"].tolist()


@pytest.fixture
def equal_hosts(monkeypatch):
    """Each of two hosts gets one of two clients, even if a busy machine slows one host down."""
    monkeypatch.setattr(Rates, "measured", lambda *given: None)


def test_the_bytes_that_cross_processes_are_counted(pool, equal_hosts):
    population = blobs(2)  # a client for each host
    plan = blueprint(FedAvg(), population, model=Net(False), rounds=2)
    server = Server(plan, population, SharedFleet(plan, population, pool, 2), Evaluation(every=2, points=("global",)))
    trained, scored = server.run()
    assert trained.bytes_to_hosts == 4 * PARAMETERS  # once for both
    assert scored.bytes_to_hosts == 4 * PARAMETERS + 4 * PARAMETERS  # the model that is scored, too
    assert trained.bytes_from_hosts == scored.bytes_from_hosts == 2 * 4 * PARAMETERS  # a reply of each host
    assert sum(trained.bytes_down.values()) == sum(trained.bytes_up.values()) == 2 * 4 * PARAMETERS
    for record in Server(plan, population, LocalFleet(plan, population), Evaluation(points=("global",))).run():
        assert record.bytes_to_hosts == record.bytes_from_hosts == 0


def test_small_states_and_fields_of_single_clients_count_as_bytes_to_hosts(pool, equal_hosts):
    population = blobs(2)
    plan = blueprint(Greeting(), population, model=Net(False), rounds=2)
    server = Server(plan, population, SharedFleet(plan, population, pool, 2), Evaluation(every=3, points=("global",)))
    sent = 4 * PARAMETERS
    first, second = server.run()
    assert first.bytes_to_hosts == sent + 2 * 8 * 5  # without states
    assert second.bytes_to_hosts == 2 * sent + 2 * 8 * 5 + 2 * 4 * 7  # with states; scored as the last round
    assert first.bytes_from_hosts == second.bytes_from_hosts == 2 * sent + 2 * 4 * 7


class WeighedOnTheServer(FedAvg):
    """FedAvg whose server gives all clients the same weight, after their replies."""

    def weights(self, ctx, server, replies):
        return [1 / len(replies)] * len(replies)


@pytest.mark.parametrize(("algorithm", "large"), [(FedAvg(), 2**26), (FedAvg(), 0), (WeighedOnTheServer(), 2**26)])
def test_a_host_sends_one_sum_for_all_of_its_clients(algorithm, large, pool, monkeypatch):
    monkeypatch.setattr("rayfed.distributed.ray_fleet._LARGE_PAYLOAD", large)
    population = blobs(20)
    plan = blueprint(algorithm, population, model=Net(False), rounds=2)
    evaluation = Evaluation(every=2, points=("global",), metrics={"gradient_norm": GradientNorm(splits=["val"])})
    hashes = set()
    for hosts in (0, 1, 2):
        fleet = SharedFleet(plan, population, pool, hosts) if hosts else LocalFleet(plan, population)
        server = Server(plan, population, fleet, evaluation)
        trained, scored = server.run()
        assert trained.bytes_from_hosts == hosts * 8 * PARAMETERS
        gradients = scored.bytes_from_hosts - trained.bytes_from_hosts  # of two domains
        assert min(hosts, 2) * 8 * PARAMETERS <= gradients <= hosts * 2 * 8 * PARAMETERS
        hashes.add((server.state_hash(), *sorted(score for score in scored.scores if score.point == "global")))
    assert len(hashes) == 1


@pytest.mark.parametrize("algorithm", [FedAvg(), WeighedOnTheServer()], ids=["fedavg", "weighed"])
def test_sums_of_chunks_are_handed_over_once_and_only_where_hosts_weigh(algorithm):
    plan = blueprint(algorithm, SIX, model=Net(False))
    methods = HostMethods()
    methods.take_up(plan, SIX, 0.0)
    down = pack(plan.algorithm.broadcast(methods.host.ctx, plan.algorithm.init(methods.host.ctx)))
    weights = {client: (client + 1) / 6 for client in range(3)}
    request = ExchangeRequest(moment=Moment("round", 1), cohort=(0, 1, 2), clients=(0, 1, 2), weights=weights)

    def sums(*chunks):
        for clients in chunks:
            methods.ask("exchange", pack((request.part(clients), {}, {})), 1, down)
        found = unpack(methods.sums(), torch.device("cpu"))
        return {key: state_hash(total.result()) for key, total in found.items()}

    assert sums((0, 1), (2,)) == sums((2,), (0,), (1,)) == sums((0, 1, 2))
    assert set(sums((0, 1, 2))) == ({""} if type(algorithm) is FedAvg else set())
    assert sums() == {}


def test_clients_return_to_the_host_that_has_their_states(pool, equal_hosts):
    planned = []

    class Noting(SharedFleet):
        def _schedule(self, units, kind):
            schedule = super()._schedule(units, kind)
            planned.append([(unit.home, host) for host, plan in schedule._plans.items() for unit in plan])
            return schedule

    population = blobs(6, sizes=(20,))
    plan = blueprint(Scaffold(), population)
    list(Server(plan, population, Noting(plan, population, pool, 2), Evaluation(points=())).run())
    first, second = planned
    assert {home for home, _ in first} == {None}
    had = Counter(home for home, _ in second)
    assert had.total() == 6
    assert sum(home == host for home, host in second) == sum(min(3, count) for count in had.values())


def test_a_host_that_dies_before_it_sent_its_sum_ends_the_attempt(session):
    lonely = HostPool([{}] * 2, None)

    class Dying(SharedFleet):
        def _ask_for_sums(self):
            lonely.close()
            with contextlib.suppress(ray.exceptions.RayActorError):
                while True:  # it takes a moment to die
                    ray.get(lonely.actors[0].call.remote("sums"))
            super()._ask_for_sums()

    plan = blueprint(Scaffold(), SIX)
    fleet = Dying(plan, SIX, lonely, 1)
    with pytest.raises(HostLost, match="host 0 died"):
        outcome(plan, SIX, fleet)
    assert not len(fleet.states)


class Greeting(FedAvg):
    """FedAvg that sends five numbers of 64 bits to each client, which keeps seven of 32 bits."""

    def unicast(self, ctx, server):
        return {"greeting": torch.zeros(5, dtype=torch.float64)}

    def finish(self, ctx, work, client, down, data):
        state, up = super().finish(ctx, work, client, down, data)
        return state | {"kept": torch.zeros(7)}, up


def test_unseen_clients_are_the_same_wherever_they_live(pool):
    people = dataclasses.replace(SIX, unseen_clients=2)
    plan = blueprint(DBE(), people, cohort=3)
    found = end_alike(plan, people, SharedFleet(plan, people, pool, 2))
    assert len({score.client for score in found.scores[-1] if score.unseen}) == 2


def test_divergence_in_a_host_arrives(pool):
    plan = blueprint(FedAvg(), SIX, loss=lambda logits, y: logits.sum() * float("inf"))
    with pytest.raises(Diverged, match="round 1, client "):
        outcome(plan, SIX, SharedFleet(plan, SIX, pool, 2))


class TwoArguments(Exception):
    """An exception that can be pickled, but not read again."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class TestThroughTheApi:
    """The whole way: a server actor, host actors in a placement group, a recorder actor."""

    @pytest.fixture
    def run(self, tmp_path):
        def run(hosts, name="fedavg", *, loss=None, **more):
            config = {
                "algorithm.name": name,
                "rounds": 2,
                "cohort": 4,
                "local.batch_size": 5,
                "placement": {"hosts": hosts, "cpus": 0.25},
                "results": str(tmp_path / "results"),
            }
            return rayfed.run({**config, **more}, clients=list(SIX.clients), model=Net, loss=loss)

        return run

    def table(self, tmp_path, name="trials"):
        return pd.read_parquet(tmp_path / "results" / "run" / name)

    def test_same_hash_same_bytes_same_name(self, run):
        all_cpus = {"placement.cpus": 1.75, "placement.server_cpus": 0.5}
        alone, spread = run(0, "scaffold"), run(2, "scaffold", **all_cpus)
        assert spread.weights_hash == alone.weights_hash
        assert spread.trial == alone.trial
        for column in ("bytes_down", "bytes_up", "cohort", "round"):
            assert spread.rounds[column].tolist() == alone.rounds[column].tolist()
        order = ["round", "client", "split", "point", "metric"]
        values = [r.metrics.sort_values(order)["value"].tolist() for r in (alone, spread)]
        assert values[0] == values[1]
        assert sorted(spread.clients) == sorted(alone.clients)
        assert spread.trials["status"].tolist() == ["done"]
        deadline = time.monotonic() + 10  # for the CPUs, without which the next run would wait for ever
        while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ray.available_resources()["CPU"] == 4

    @pytest.mark.parametrize("kind", ["error", "two arguments", "death"])
    def test_what_goes_wrong_in_a_host_arrives_and_is_recorded(self, run, tmp_path, monkeypatch, kind):
        driver = os.getpid()  # which tries the loss out before anything starts

        def loss(logits, y):
            if os.getpid() == driver:
                return logits.mean()
            if kind == "error":
                raise ZeroDivisionError("my own mistake")
            if kind == "two arguments":
                raise TwoArguments("my own", "mistake")
            os._exit(1)

        expected, text = {
            "error": (ZeroDivisionError, "ZeroDivisionError: my own mistake"),
            "two arguments": (RuntimeError, "RuntimeError: TwoArguments: my own mistake"),
            "death": (HostLost, "lost (host 0 died: "),
        }[kind]
        with pytest.raises(expected, match=re.escape(text.partition(": ")[2] or text)):
            run(1, loss=loss, **{"faults.restarts": 0})
        (row,) = self.table(tmp_path).to_dict("records")
        assert row["status"] == "failed"
        assert row["error"].startswith(text)
        assert "in loss" in row["traceback"] or kind != "error"


class TestHostsThatAreLost:
    """The fleet says which host was lost, and why; the trial then starts again from its last checkpoint."""

    class Breaking(FedAvg):
        kind: str

        def finish(self, ctx, work, client, down, data):
            if ray._private.worker.global_worker.mode == ray.WORKER_MODE and ctx.round == 2 and ctx.client == 3:
                if self.kind == "death":
                    os._exit(1)
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
            return super().finish(ctx, work, client, down, data)

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("death", "host 0 died: its process was killed or crashed"),
            ("gpu", "host 0 failed: CUDA error: an illegal memory access was encountered"),
        ],
    )
    def test_by_name(self, kind, words):
        algorithm = self.Breaking()
        object.__setattr__(algorithm, "kind", kind)
        plan, pool = blueprint(algorithm, SIX, rounds=3), HostPool([{}, {}], None)
        try:
            with pytest.raises(HostLost) as error:
                outcome(plan, SIX, SharedFleet(plan, SIX, pool, 1))
        finally:
            pool.close()
        assert str(error.value) == words
