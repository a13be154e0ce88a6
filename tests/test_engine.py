"""The engine: which client goes where, what crosses the network, in which order hooks run, and what is random."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import Net, Point, blobs, blueprint, net, quadratic, quadratics, simulate
from torch.nn.functional import cross_entropy

from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import Diverged, UsageError
from rayfed.core.optim import SGD
from rayfed.core.records import Record, Score
from rayfed.core.rng import generator, seed_of, torch_state_kept
from rayfed.core.task import Task
from rayfed.core.trees import nbytes, tree_map
from rayfed.engine.blueprint import deal
from rayfed.engine.device_data import batch_rows
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.purity import ImpureHook
from rayfed.engine.serialization import bytes_by_field, pack, state_hash, unpack
from rayfed.engine.server import Evaluation, Server
from rayfed.models.build import build_model

POINT = ["downloaded"]  # where batch norm stays with the clients there is no global model


class TestDeal:
    SIZES = (100, 1, 50, 50, 7, 30, 62, 100, 3, 0)

    @pytest.mark.parametrize("hosts", [1, 2, 3, 4, 10, 12])
    def test_everyone_has_one_home(self, hosts):
        homes = deal(self.SIZES, hosts)
        assert len(homes) == hosts
        assert sorted(i for home in homes for i in home) == list(range(len(self.SIZES)))
        assert all(home == sorted(home) for home in homes)

    def test_loads_differ_by_less_than_the_largest_client(self):
        rng = np.random.default_rng(0)
        for _ in range(20):
            sizes = rng.integers(1, 200, rng.integers(5, 40)).tolist()
            loads = [sum(sizes[i] for i in home) for home in deal(sizes, 4)]
            assert max(loads) - min(loads) <= max(sizes)

    def test_largest_first(self):
        assert deal([4, 3, 3, 2, 2, 2], 2) == [[0, 3, 4], [1, 2, 5]]  # 8 and 8; dealt by id it would be 9 and 7

    def test_equal_clients_are_spread_evenly(self):
        assert [len(home) for home in deal([10] * 12, 4)] == [3, 3, 3, 3]


class TestBatchRows:
    def rows(self, n, size, *, epochs=None, steps=None, drop_last=True, key=0):
        return batch_rows(n, size, epochs=epochs, steps=steps, drop_last=drop_last, rng=generator(key))

    def test_full_batches_only(self):
        rows = self.rows(23, 5, epochs=2)
        assert [len(some) for some in rows] == [5] * 8
        assert all(len(set(np.concatenate(rows[k : k + 4]))) == 20 for k in (0, 4))  # without replacement

    def test_the_last_batch_of_an_epoch_may_be_smaller(self):
        rows = self.rows(23, 5, epochs=2, drop_last=False)
        assert [len(some) for some in rows] == [5, 5, 5, 5, 3] * 2
        assert all(sorted(np.concatenate(rows[k : k + 5])) == list(range(23)) for k in (0, 5))

    def test_fewer_examples_than_a_batch(self):
        assert self.rows(3, 5, epochs=2) == []
        assert [sorted(some) for some in self.rows(3, 5, epochs=1, drop_last=False)] == [[0, 1, 2]]
        assert self.rows(3, 5, steps=4) == []

    def test_steps_go_on_over_epochs(self):
        rows = self.rows(20, 5, steps=6)
        assert [len(some) for some in rows] == [5] * 6
        assert sorted(np.concatenate(rows[:4])) == list(range(20))
        assert len(set(np.concatenate(rows[4:]))) == 10

    def test_steps_override_epochs_and_begin_with_the_same_batches(self):
        many, few = self.rows(20, 5, epochs=3, steps=6), self.rows(20, 5, steps=2)
        assert len(many) == 6
        np.testing.assert_array_equal(np.stack(many[:2]), np.stack(few))

    def test_epochs_are_shuffled_anew_by_the_key(self):
        first = self.rows(20, 5, epochs=2)
        assert (np.concatenate(first[:4]) != np.concatenate(first[4:])).any()
        np.testing.assert_array_equal(np.stack(first), np.stack(self.rows(20, 5, epochs=2)))
        assert (np.stack(first) != np.stack(self.rows(20, 5, epochs=2, key=1))).any()


class TestSeeds:
    def test_parts_are_kept_apart(self):
        assert seed_of(1, 23) != seed_of(12, 3)
        assert seed_of(0, "a") == seed_of(0, "a")
        assert 0 <= seed_of("x") < 2**56

    def test_torch_is_left_alone(self):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)

        def interfere():
            with torch_state_kept():
                torch.manual_seed(9)
                torch.set_num_threads(2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interfere()
        assert torch.get_num_threads() == 1
        assert torch.equal(torch.rand(2), expected)


class TestPayload:
    TREE: ClassVar[dict] = {
        "w": {"a": torch.arange(6.0).view(2, 3).t(), "n": torch.tensor(3)},
        "half": torch.ones(3, dtype=torch.float16),
        "flags": [torch.tensor([True, False]), None],
    }

    def test_there_and_back(self):
        back = unpack(pack(self.TREE), torch.device("cpu"))
        assert state_hash(back) == state_hash(self.TREE)
        assert back["flags"][1] is None

    def test_tensors_without_elements(self):
        (back,) = unpack(pack([torch.zeros(0, 4, dtype=torch.float64)]), torch.device("cpu"))
        assert (back.shape, back.dtype) == ((0, 4), torch.float64)

    def test_what_arrives_is_the_receivers_own(self):
        weight = torch.zeros(2)
        packed = pack({"w": weight})
        unpack(packed, torch.device("cpu"))["w"].add_(1)
        assert weight.tolist() == unpack(packed, torch.device("cpu"))["w"].tolist() == [0, 0]

    def test_bytes(self):
        assert bytes_by_field(self.TREE) == {"w": 32, "half": 6, "flags": 2}

    def test_fingerprint_sees_names_types_shapes_and_bits(self):
        hashes = {
            state_hash(tree)
            for tree in (
                {"a": torch.zeros(4)},
                {"b": torch.zeros(4)},
                {"a": torch.zeros(2, 2)},
                {"a": torch.zeros(4, dtype=torch.int32)},
                {"a": -torch.zeros(4)},
                {"a": torch.zeros(4), "b": torch.zeros(4)},
            )
        }
        assert len(hashes) == 6
        assert state_hash({"a": torch.zeros(1), "b": torch.ones(1)}) == state_hash(
            {"b": torch.ones(1), "a": torch.zeros(1)}
        )


class TestExactSum:
    def test_the_order_is_free(self):
        torch.manual_seed(0)
        trees = [{"w": torch.randn(50) * 10.0 ** float(k - 4)} for k in range(8)]
        weights = [0.3, 0.1, 0.05, 0.15, 0.1, 0.1, 0.1, 0.1]

        def added(order, parts):
            sums = [ExactSum() for _ in range(parts)]
            for position, i in enumerate(order):
                sums[position % parts].add(trees[i], weights[i])
            whole = ExactSum()
            for part in sums:
                whole.merge(part)
            return whole.result()["w"]

        first = added(range(8), 1)
        exact = sum(tree["w"].double() * weight for tree, weight in zip(trees, weights, strict=True))
        torch.testing.assert_close(first.double(), exact, rtol=1e-7, atol=1e-11)
        assert all(torch.equal(first, added(order, k)) for k in (1, 2, 3) for order in (range(8), range(7, -1, -1)))

    def test_counters_become_their_maximum(self):
        total = ExactSum()
        for count in (3, 9, 4):
            total.add({"n": torch.tensor(count)}, 1 / 3)
        assert total.result()["n"].item() == 9
        assert total.result()["n"].dtype == torch.int64


class TestCohorts:
    def cohorts(self, **changes):
        population = blobs(8)
        plan = blueprint(FedAvg(), population, model=Net(False), rounds=6, cohort=3, **changes)
        server = Server(plan, population, LocalFleet(plan, population), Evaluation())
        return [server.sample(number) for number in range(1, 7)]

    def test_reproducible_and_keyed_by_the_round(self):
        first = self.cohorts()
        assert first == self.cohorts()
        assert first != self.cohorts(seed=1)
        assert len(set(first)) > 1
        assert all(len(set(c)) == 3 and list(c) == sorted(c) and set(c) <= set(range(8)) for c in first)

    def test_uniform(self):
        population = blobs(8)
        plan = blueprint(FedAvg(), population, model=Net(False), cohort=3)
        server = Server(plan, population, LocalFleet(plan, population), Evaluation())
        counts = Counter(i for number in range(2000) for i in server.sample(number))
        assert all(650 < counts[i] < 850 for i in range(8))  # 750 expected, standard deviation 22

    def test_mean_is_over_the_cohort(self):
        """The server's next w is the mean of the sampled clients' own points after one exact step."""
        population = quadratics((1, 1), (1, 2), (1, 4), (1, 8))
        plan = blueprint(
            FedAvg(), population, model=Point(), loss=quadratic, optimizer=SGD(lr=1.0), batch_size=1, rounds=1, cohort=2
        )
        server, records = simulate(plan, population)
        targets = [1, 2, 4, 8]
        assert server.state["weights"]["w"].item() == np.mean([targets[i] for i in server.sample(1)])
        assert records[0].cohort == 2


class TestAveraging:
    def test_weights_are_the_shares_of_examples(self):
        population = quadratics((1, 0), (1, 4))
        big = quadratics((1, 4), copies=3).clients[0].train
        second = dataclasses.replace(population.clients[1], train=big)
        population = dataclasses.replace(population, clients=(population.clients[0], second))
        plan = blueprint(
            FedAvg(), population, model=Point(), loss=quadratic, optimizer=SGD(lr=1.0), batch_size=1, rounds=1
        )
        server, _ = simulate(plan, population)
        assert server.state["weights"]["w"].item() == 3.0  # (1·0 + 3·4) / 4


log: list[tuple] = []


@dataclass(frozen=True, kw_only=True)
class Recording(FedAvg):
    """FedAvg that notes its hooks and talks to single clients, with two exchanges everywhere."""

    @property
    def round_exchanges(self):
        return (self,) * 2

    @property
    def setup_exchanges(self):
        return (self,) * 2

    @property
    def final_exchanges(self):
        return (self,) * 1

    def note(self, hook, ctx):
        log.append((hook, ctx.stage, ctx.round, ctx.exchange, ctx.client, ctx.cohort))

    def broadcast(self, ctx, server):
        self.note("broadcast", ctx)
        return super().broadcast(ctx, server)

    def unicast(self, ctx, server):
        return {"mine": torch.full((4,), float(ctx.client))} if ctx.client % 2 == 0 else {}

    def join(self, ctx):
        self.note("join", ctx)
        return super().join(ctx) | {"times": torch.zeros(())}

    def start(self, ctx, client, down):
        self.note("start", ctx)
        assert ("mine" in down) == (ctx.client % 2 == 0)
        assert "mine" not in down or down["mine"].tolist() == [ctx.client] * 4
        return super().start(ctx, client, down)

    def finish(self, ctx, work, client, down, data):
        self.note("finish", ctx)
        client, up = super().finish(ctx, work, client, down, data)
        return client | {"times": client["times"] + 1}, up | {"number": torch.tensor(float(ctx.client))}

    def aggregate(self, ctx, server, replies):
        self.note("aggregate", ctx)
        assert [reply.client for reply in replies.each] == list(ctx.cohort)
        assert [reply.up["number"].item() for reply in replies.each] == list(ctx.cohort)
        assert all("weights" not in reply.up for reply in replies.each)
        return super().aggregate(ctx, server, replies)


@pytest.fixture(scope="module")
def run():
    log.clear()
    population = blobs(5)
    plan = blueprint(Recording(), population, model=net(False), cohort=2)
    server, records = simulate(plan, population, points=["trained"], every=2)
    return server, records, list(log)


class TestExchanges:
    def test_order_and_cohorts(self, run):
        server, _, noted = run
        expected = []
        everyone = tuple(range(5))
        for stage, round, trips, cohort in (
            ("setup", 0, 2, everyone),
            ("round", 1, 2, server.sample(1)),
            ("round", 2, 2, server.sample(2)),
            ("final", 3, 1, everyone),
        ):
            for trip in range(trips):
                expected.append(("broadcast", stage, round, trip, -1, cohort))
                for client in cohort:
                    expected += [(hook, stage, round, trip, client, cohort) for hook in ("start", "finish")]
                expected.append(("aggregate", stage, round, trip, -1, cohort))
        assert [entry for entry in noted if entry[0] != "join"] == expected
        assert Counter(entry[4] for entry in noted if entry[0] == "join") == dict.fromkeys(everyone, 1)

    def test_client_state_is_kept(self, run):
        server, _, noted = run
        finished = Counter(entry[4] for entry in noted if entry[0] == "finish")
        assert {i: int(state["times"]) for i, state in server.fleet.save().items()} == finished

    def test_bytes_of_every_field(self, run):
        server, records, _ = run
        model = nbytes(server.state["weights"])
        for record in records:
            cohort = server.sample(record.round) if record.stage == "round" else range(5)
            trips = 1 if record.stage == "final" else 2
            even = sum(i % 2 == 0 for i in cohort)
            assert record.bytes_down["weights"] == trips * len(cohort) * model
            assert record.bytes_down.get("mine", 0) == trips * even * 16
            assert record.bytes_up == {"weights": trips * len(cohort) * model, "number": trips * len(cohort) * 4}

    def test_records(self, run):
        _, records, _ = run
        assert [(r.stage, r.round, r.cohort) for r in records] == [
            ("setup", 0, 5),
            ("round", 1, 2),
            ("round", 2, 2),
            ("final", 3, 5),
        ]
        assert all(r.seconds["total"] >= r.seconds["train"] > 0 for r in records)

    def test_trained_models_are_scored_in_the_last_trip_of_a_due_round(self, run):
        server, records, _ = run
        for record in records:
            scored = Counter(s.client for s in record.scores if s.split == "test")
            due = server.sample(2) if (record.stage, record.round) == ("round", 2) else ()
            assert scored == dict.fromkeys(due, 2)  # accuracy and loss, once each


@dataclass(frozen=True, kw_only=True)
class Late(FedAvg):
    """The server weighs by what the clients send: all to the one with the greatest number."""

    server_side_weighting: ClassVar[bool] = True
    total: float = 1.0

    def finish(self, ctx, work, client, down, data):
        client, up = super().finish(ctx, work, client, down, data)
        return client, up | {"loss": torch.tensor(float(ctx.client))}

    def weights(self, ctx, server, replies):
        best = max(replies, key=lambda reply: reply.up["loss"])
        return [self.total * (reply is best) for reply in replies]


class TestLateWeights:
    @pytest.mark.parametrize("total", [1.0, 0.5, -1.0])
    def test_are_taken_as_they_are(self, total):
        population = quadratics((1, 1), (1, 2), (1, 4))
        changes = {"model": Point(), "loss": quadratic, "optimizer": SGD(lr=1.0), "batch_size": 1, "rounds": 1}
        server, _ = simulate(blueprint(Late(total=total), population, **changes), population)
        assert server.state["weights"]["w"].item() == 4 * total


@dataclass(frozen=True, kw_only=True)
class Impure(FedAvg):
    where: str = ""

    def touch(self, where, weights):
        if self.where == where:
            next(iter(weights.values())).add_(1)

    def broadcast(self, ctx, server):
        self.touch("broadcast", server["weights"])
        return super().broadcast(ctx, server)

    def step(self, ctx, work, down, batch):
        self.touch("step", down["weights"])
        self.touch("step of work", work["weights"])
        return super().step(ctx, work, down, batch)

    def finish(self, ctx, work, client, down, data):
        self.touch("finish", down["weights"])
        self.touch("finish of client", client["weights"])
        return super().finish(ctx, work, client, down, data)

    def aggregate(self, ctx, server, replies):
        self.touch("aggregate", server["weights"])
        return super().aggregate(ctx, server, replies)


class TestPurity:
    def run(self, where):
        population = blobs(2)
        return simulate(
            blueprint(Impure(where=where), population, batch_norm="local", rounds=1), population, points=POINT
        )

    @pytest.mark.parametrize(
        ("where", "hook", "lent"),
        [
            ("broadcast", "broadcast", "server"),
            ("step", "step", "down"),
            ("finish", "finish", "down"),
            ("finish of client", "finish", "client"),
            ("aggregate", "aggregate", "server"),
        ],
    )
    def test_changing_what_is_lent_is_told(self, where, hook, lent):
        with pytest.raises(ImpureHook, match=rf"Impure\.{hook} changed `{lent}` in place.*x = x \+ y.*clone"):
            self.run(where)

    def test_work_is_private(self):
        self.run("step of work")

    def test_start_may_share_its_arguments(self):
        """FedAvg's work begins as the download itself; that the steps change it in place must not be seen there."""
        population = blobs(2)
        plan = blueprint(FedAvg(), population, rounds=1)
        server = Server(plan, population, LocalFleet(plan, population), Evaluation())
        before = state_hash(server.state)
        kept = server.state
        list(server.run())
        assert state_hash(kept) == before


BN = {f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
STATISTICS = {name for name in BN if "running" in name or "tracked" in name}


class TestBatchNorm:
    def run(self, policy, rounds=2):
        population = blobs(3)
        return simulate(
            blueprint(FedAvg(), population, batch_norm=policy, rounds=rounds), population, points=["downloaded"]
        )

    @pytest.mark.parametrize(
        ("policy", "kept"), [("aggregate", set()), ("local", BN), ("local_statistics", STATISTICS), ("frozen", set())]
    )
    def test_what_travels_and_what_stays(self, policy, kept):
        server, records = self.run(policy)
        names = set(net().state_dict())
        assert set(server.state["weights"]) == names - kept
        sent = sum(net().state_dict()[name].nbytes for name in names - kept)
        assert records[0].bytes_up["weights"] == records[0].bytes_down["weights"] == 3 * sent
        states = server.fleet.save()
        assert all(set(state["weights"]) == kept for state in states.values())
        for name in kept:
            assert not torch.equal(states[0]["weights"][name].double(), states[1]["weights"][name].double()) or (
                name.endswith("tracked")
            )

    def test_aggregated_statistics_are_the_weighted_mean(self):
        server, _ = self.run("aggregate", rounds=1)
        alone, _ = self.run("local_statistics", rounds=1)
        sizes = [20, 26, 33]
        states = alone.fleet.save()
        mean = sum(n / 79 * states[i]["weights"]["body.1.running_mean"].double() for i, n in enumerate(sizes))
        torch.testing.assert_close(server.state["weights"]["body.1.running_mean"].double(), mean)

    def test_the_counter_stays_a_whole_number(self):
        server, _ = self.run("aggregate", rounds=2)
        counter = server.state["weights"]["body.1.num_batches_tracked"]
        assert counter.dtype == torch.int64
        assert counter.item() == 12  # the client with most: 33 // 5 = 6 steps a round
        local, _ = self.run("local", rounds=2)
        counts = [int(s["weights"]["body.1.num_batches_tracked"]) for s in local.fleet.save().values()]
        assert counts == [8, 10, 12]

    def test_frozen_leaves_the_layer_as_it_was(self):
        server, _ = self.run("frozen")
        initial = net().state_dict()
        assert all(torch.equal(server.state["weights"][name], initial[name]) for name in BN)
        assert not torch.equal(server.state["weights"]["fc.weight"], initial["fc.weight"])


class TestEvaluation:
    POINTS = ("global", "downloaded", "trained", "adapted")

    def run(self, points, rounds=2, every=1, algorithm=None, **changes):
        population = blobs(4)
        plan = blueprint(algorithm or FedAvg(), population, rounds=rounds, **changes)
        return simulate(plan, population, points=points, every=every)

    def by_point(self, record, split="test", metric="accuracy"):
        return {
            point: {s.client: s.value for s in record.scores if (s.point, s.split, s.metric) == (point, split, metric)}
            for point in self.POINTS
        }

    def test_all_four_points(self):
        _, records = self.run(self.POINTS)
        for record in records:
            values = self.by_point(record)
            assert all(set(values[point]) == {0, 1, 2, 3} for point in self.POINTS)
            assert values["global"] == values["downloaded"]  # nothing personal in FedAvg
            assert self.by_point(record, metric="loss")["trained"] != self.by_point(record, metric="loss")["global"]

    def test_adapted_is_what_the_next_round_would_train(self):
        """Local batch norm, one epoch: `adapted` trains from the download, and changes no client's state."""
        plain, _ = self.run(["downloaded"], batch_norm="local")
        adapted, _ = self.run(["downloaded", "adapted"], batch_norm="local")
        assert plain.state_hash() == adapted.state_hash()

    def test_only_due_rounds_are_scored_and_always_the_last(self):
        _, records = self.run(["global", "trained"], rounds=5, every=2)
        assert [r.round for r in records if any(s.metric == "accuracy" for s in r.scores)] == [2, 4, 5]

    def test_trained_scores_are_of_the_cohort_only(self):
        server, records = self.run(["trained", "global"], cohort=2)
        values = self.by_point(records[0])
        assert set(values["trained"]) == set(server.sample(1))
        assert set(values["global"]) == {0, 1, 2, 3}

    def test_before_the_first_round(self):
        population = blobs(4)
        plan = blueprint(FedAvg(), population)
        server = Server(plan, population, LocalFleet(plan, population), Evaluation(initial=True))
        first = next(server.run())
        assert (first.stage, first.round) == ("setup", 0)
        assert set(self.by_point(first)["global"]) == {0, 1, 2, 3}

    @pytest.mark.parametrize("policy", ["aggregate", "local"])
    def test_evaluation_changes_nothing(self, policy):
        """Cohorts of two: an evaluation meets clients before their first round, and must not leave a trace."""
        points = ["downloaded", "trained", "adapted"]
        often, _ = self.run(points, rounds=4, every=1, cohort=2, batch_norm=policy)
        seldom, _ = self.run(["downloaded"], rounds=4, every=4, cohort=2, batch_norm=policy)
        assert often.state_hash() == seldom.state_hash()

    def test_not_even_where_hooks_draw_random_numbers(self):
        often, _ = self.run(("downloaded", "adapted"), rounds=3, algorithm=Noisy())
        seldom, _ = self.run(("downloaded",), rounds=3, every=3, algorithm=Noisy())
        assert often.state_hash() == seldom.state_hash()

    def test_scores_are_right(self):
        population = blobs(4)
        server, records = self.run(["global"])
        model = Net()
        model.load_state_dict(server.state["weights"])
        model.eval()
        x, y = (torch.from_numpy(part) for part in (population.clients[2].test.x, population.clients[2].test.y))
        with torch.no_grad():
            logits = model(x)
        values = {s.metric: s for s in records[-1].scores if (s.client, s.split, s.point) == (2, "test", "global")}
        assert values["accuracy"].value == (logits.argmax(1) == y).sum().item() / 15
        assert values["loss"].value == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-6)
        assert values["accuracy"].n == 15


@dataclass(frozen=True, kw_only=True)
class Noisy(FedAvg):
    """Draws in every hook that may."""

    def init(self, ctx):
        return super().init(ctx) | {"noise": torch.rand(2)}

    def join(self, ctx):
        return super().join(ctx) | {"noise": torch.rand(2)}

    def start(self, ctx, client, down):
        return super().start(ctx, client, down) | {"noise": torch.rand(2)}

    def step(self, ctx, work, down, batch):
        noise = torch.rand(2)
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"noise": work["noise"] + noise}, metrics

    def finish(self, ctx, work, client, down, data):
        kept, up = super().finish(ctx, work, client, down, data)
        return kept | {"noise": client["noise"] + work["noise"] + torch.rand(2)}, up

    def aggregate(self, ctx, server, replies):
        return super().aggregate(ctx, server, replies) | {"noise": server["noise"] + torch.rand(2)}


class TestRandomness:
    def test_the_seed_decides(self):
        population = blobs(4)

        def run(seed):
            return simulate(blueprint(Noisy(), population, seed=seed), population)[0]

        torch.manual_seed(5)
        first = run(0)
        torch.manual_seed(6)
        assert run(0).state_hash() == first.state_hash()
        assert not torch.equal(run(1).state["noise"], first.state["noise"])

    def test_clients_draw_their_own(self):
        server, _ = simulate(blueprint(Noisy(), blobs(4)), blobs(4))
        noise = [tuple(state["noise"].tolist()) for state in server.fleet.save().values()]
        assert len(set(noise)) == 4


class TestWidth:
    @pytest.mark.parametrize("width", [2, 3, 4])
    def test_clients_together_train_as_they_do_alone(self, width):
        population = blobs(4)
        alone, _ = simulate(blueprint(FedAvg(), population), population)
        plan = blueprint(FedAvg(), population, vmap_clients=width)
        together, _ = simulate(plan, population)
        tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6), alone.state, together.state)

    def test_with_fewer_steps_for_some(self):
        """Clients of 4, 5, 6 and 8 steps: those that are done must not move on."""
        population = blobs(4)
        plan = blueprint(FedAvg(), population, vmap_clients=4, rounds=1, batch_norm="local")
        server, _ = simulate(plan, population, points=POINT)
        counts = [int(s["weights"]["body.1.num_batches_tracked"]) for s in server.fleet.save().values()]
        assert counts == [4, 5, 6, 8]


class TestDivergence:
    def test_of_a_client(self):
        population = blobs(3)
        plan = blueprint(FedAvg(), population, model=net(False), optimizer=SGD(lr=1e20), rounds=3)
        with pytest.raises(Diverged, match=r"round 1, client \d: training loss is (inf|nan)"):
            simulate(plan, population)

    def test_of_the_server(self):
        @dataclass(frozen=True, kw_only=True)
        class Broken(FedAvg):
            def aggregate(self, ctx, server, replies):
                return tree_map(lambda t: t / 0, super().aggregate(ctx, server, replies))

        population = blobs(3)
        with pytest.raises(Diverged, match=r"round 1, server: weights\..* is no longer finite"):
            simulate(blueprint(Broken(), population, model=net(False)), population)


class TestChecks:
    def test_a_batch_larger_than_a_client(self):
        with pytest.raises(UsageError, match=r"local.batch_size=21: client 0 has 20 training examples"):
            simulate(blueprint(FedAvg(), blobs(4), batch_size=21), blobs(4))
        simulate(blueprint(FedAvg(), blobs(4), batch_size=50, drop_last=False, model=net(False)), blobs(4))

    def test_width_needs_equal_batches(self):
        with pytest.raises(UsageError, match=r"placement.vmap_clients=2: .*client 1"):
            simulate(blueprint(FedAvg(), blobs(4), vmap_clients=2, drop_last=False), blobs(4))

    def test_phases_of_steps(self):
        population = blobs(4)
        plan = blueprint(FedAvg(), population, local=Phase("train", steps=3), rounds=1, batch_norm="local")
        server, _ = simulate(plan, population, points=POINT)
        assert {int(s["weights"]["body.1.num_batches_tracked"]) for s in server.fleet.save().values()} == {3}


def test_images_of_one_channel_take_the_fast_convolutions():
    """Torch picks its kernels by strides, which are ambiguous with one channel; the slow ones cost a quarter more."""
    task = Task(build_model("cnn", {}, (1, 28, 28), 10), cross_entropy, num_clients=1, num_classes=10)
    first = next(value for value in task.initial_weights().values() if value.dim() == 4)
    assert first.shape[1] == 1
    assert first.stride() == (25, 1, 5, 1)
    copied = ExactSum()
    copied.add({"w": first.clone()}, 1.0)
    assert task.to_memory_format(copied.result())["w"].stride() == (25, 1, 5, 1)
    plain = first.contiguous(memory_format=torch.contiguous_format).reshape(-1).reshape(first.shape)  # as unpacked
    assert task.to_memory_format({"w": plain})["w"].stride() == (25, 1, 5, 1)


def test_the_accuracy_of_a_round_is_the_mean_over_participants_at_one_point():
    """Unseen clients, other points and other metrics are left out; test sets stand in where no client has the split."""
    rows = [
        (0, "test", "global", "accuracy", 0.5, False),
        (1, "test", "global", "accuracy", 0.7, False),
        (2, "test", "global", "accuracy", 0.0, True),
        (-1, "test", "global", "accuracy", 0.0, False),
        (0, "test", "trained", "accuracy", 0.0, False),
        (0, "test", "global", "loss", 9.0, False),
        (-1, "ood", "global", "accuracy", 0.25, False),
    ]
    scores = [
        Score(client=i, domain="d", split=split, point=point, metric=metric, value=value, n=1, unseen=unseen)
        for i, split, point, metric, value, unseen in rows
    ]
    found = Record(stage="round", round=1, cohort=2, scores=scores).accuracy("global")
    assert found == {"test": pytest.approx(0.6), "ood": 0.25}
