"""The server: who is sampled, in which order hooks run, how replies are averaged, what is scored and what is random."""

import dataclasses
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from helpers.federations import Net, Point, blobs, blueprint, net, new_server, quadratic, quadratics, simulate
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import Diverged
from rayfed.core.optim import SGD
from rayfed.core.round_record import Record, Score
from rayfed.core.trees import nbytes, tree_map
from rayfed.sampling.base import PowerOfChoice, Uniform


class TestCohorts:
    def cohorts(self, **changes):
        population = blobs(8)
        plan = blueprint(FedAvg(), population, model=Net(False), rounds=6, cohort=3, **changes)
        server = new_server(plan, population)
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
        server = new_server(plan, population)
        counts = Counter(i for number in range(2000) for i in server.sample(number))
        assert all(650 < counts[i] < 850 for i in range(8))  # 750 expected, standard deviation 22

    def test_the_mean_is_over_the_cohort_with_the_shares_of_examples(self):
        """After one exact step, a client's w is its own point."""
        people, more = quadratics((1, 1), (1, 2), (1, 4)), quadratics((1, 4), copies=3).clients[0].train
        people = dataclasses.replace(
            people, clients=(*people.clients[:2], dataclasses.replace(people.clients[2], train=more))
        )
        exact = {"model": Point(), "loss": quadratic, "optimizer": SGD(lr=1.0), "batch_size": 1, "rounds": 1}
        for cohort in (2, 3):
            server, _ = simulate(blueprint(FedAvg(), people, cohort=cohort, **exact), people)
            drawn = list(server.sample(1))
            expected = np.average(np.array([1, 2, 4])[drawn], weights=np.array([1, 1, 3])[drawn])
            assert server.state["weights"]["w"].item() == expected


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
        assert {i: int(state["times"]) for i, state in server.fleet.states.items()} == finished

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


class Watching(FedAvg):
    """FedAvg that counts, when a client begins, the weights of earlier clients that are still in memory."""

    def __init__(self):
        vars(self).update(finished=[], alive=[])

    def start(self, ctx, client, down):
        self.alive.append(sum(weights() is not None for weights in self.finished))
        return super().start(ctx, client, down)

    def finish(self, ctx, work, client, down, data):
        self.finished.append(weakref.ref(work["weights"]["fc.weight"]))
        return super().finish(ctx, work, client, down, data)


def test_the_weights_of_a_trained_client_are_freed_before_the_next_one_trains():
    population = blobs(5)
    watching = Watching()
    simulate(blueprint(watching, population, rounds=1), population)
    assert watching.alive == [0, 1, 0, 0, 0]  # the first is kept in place of the sum, which is twice as large
    assert len(watching.finished) == 5


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
        server = new_server(plan, population, initial=True)
        first = next(server.run())
        assert (first.stage, first.round) == ("setup", 0)
        assert set(self.by_point(first)["global"]) == {0, 1, 2, 3}

    @pytest.mark.parametrize("sampler", [Uniform(), PowerOfChoice(losses="last")])
    def test_of_the_training_data_one_value_is_told(self, sampler):
        """That of the trained model, in rounds that are scored; samplers still see the means over local steps."""
        people, states = blobs(4), []
        for splits in (("test",), ("train", "test")):
            plan = blueprint(FedAvg(), people, rounds=4, cohort=2, sampler=sampler)
            server = new_server(plan, people, points=("trained",), splits=splits, every=2)
            records = list(server.run())
            states.append((server.state_hash(), server.rounds.state()))
            told = [{s.client: s for s in r.scores if (s.split, s.metric) == ("train", "loss")} for r in records]
            for record, values in zip(records, told, strict=True):
                assert len({(s.client, s.split, s.point, s.metric) for s in record.scores}) == len(record.scores)
                expected = 0 if splits == ("train", "test") and record.round % 2 else 2
                assert len(values) == expected
        assert states[0] == states[1]
        assert all(score.higher_is_better is False for score in told[1].values())  # as the score of a model declares

    @pytest.mark.parametrize("policy", ["aggregate", "local"])
    def test_evaluation_changes_nothing(self, policy):
        """Cohorts of two: an evaluation meets clients before their first round, and must not leave a trace."""
        points, given = ["downloaded", "trained", "adapted"], {"cohort": 2, "batch_norm": policy}
        often, _ = self.run(points, rounds=4, every=1, algorithm=Noisy(), **given)
        seldom, _ = self.run(["downloaded"], rounds=4, every=4, algorithm=Noisy(), **given)
        assert often.state_hash() == seldom.state_hash()


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
        noise = [tuple(state["noise"].tolist()) for state in server.fleet.states.values()]
        assert len(set(noise)) == 4


def test_a_client_that_diverges_is_named():
    population = blobs(3)
    plan = blueprint(FedAvg(), population, model=net(False), optimizer=SGD(lr=1e20), rounds=3)
    with pytest.raises(Diverged, match=r"round 1, client \d: training loss is (inf|nan)"):
        simulate(plan, population)


def test_a_server_that_diverges_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Broken(FedAvg):
        def aggregate(self, ctx, server, replies):
            return tree_map(lambda t: t / 0, super().aggregate(ctx, server, replies))

    population = blobs(3)
    with pytest.raises(Diverged, match=r"round 1, server: weights\..* is no longer finite"):
        simulate(blueprint(Broken(), population, model=net(False)), population)


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
    columns = ("client", "split", "point", "metric", "value", "unseen")
    common = {"domain": "d", "n": 1, "higher_is_better": True}
    scores = [Score(**dict(zip(columns, row, strict=True)), **common) for row in rows]
    found = Record(stage="round", round=1, cohort=2, scores=scores).means("accuracy", "global")
    assert found == {"test": pytest.approx(0.6), "ood": 0.25}
