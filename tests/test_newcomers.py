"""Newcomers: who they are, what they receive, what they are scored at."""

from dataclasses import replace

import pytest
import torch
from support import Point, blobs, blueprint, quadratic, quadratics

from rayfed.algorithm import Phase
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.algorithms.parts.two_levels import BIAS, CONSENSUS
from rayfed.engine.blueprint import homes_of
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Server
from rayfed.errors import UsageError
from rayfed.newcomers import set_apart
from rayfed.optim import SGD


def run(plan, people, **evaluation):
    server = Server(plan, people, LocalFleet(plan, people), Evaluation(**evaluation))
    return server, list(server.run())


class TestWho:
    def test_numbers_and_shares(self):
        for asked, count in ((0, 0), (3, 3), (0.29, 2), (0.3, 3), (0.0, 0)):
            people = set_apart(blobs(10), asked, seed=0)
            assert (people.newcomers, len(people.participants), len(people.clients)) == (count, 10 - count, 10)

    def test_both_groups_keep_their_order_and_everyone_their_number(self):
        people = set_apart(blobs(10), 4, seed=1)
        early, late = [c.id for c in people.participants], [c.id for c in people.clients[6:]]
        assert early == sorted(early)
        assert late == sorted(late)
        assert sorted(early + late) == list(range(10))
        assert late != [6, 7, 8, 9]

    def test_the_seed_draws_them_and_earlier_draws_leave_no_trace(self):
        drawn = [[c.id for c in set_apart(blobs(10), 4, seed).clients] for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        again = set_apart(set_apart(blobs(10), 5, seed=7), 4, seed=1)
        assert [c.id for c in again.clients] == drawn[0]
        assert [c.id for c in set_apart(again, 0, seed=1).clients] == list(range(10))

    def test_somebody_must_train(self):
        with pytest.raises(UsageError, match=r"^newcomers=4: there are 4 clients, and one at least must train$"):
            set_apart(blobs(4), 4, seed=0)

    def test_hosts_share_participants_and_newcomers_evenly(self):
        people = replace(blobs(6, sizes=(40, 30, 20, 10, 50, 60)), newcomers=2)
        assert homes_of(people, 2) == [[0, 3, 5], [1, 2, 4]]  # 40+10 and 30+20; then 60, 50


class TestQuadratics:
    """f_i = h/2 (w - a)^2; SGD of step 0.5; two participants around 1 and 3 with h = 1, then a newcomer at 5, h = 1."""

    plan = blueprint(
        FedAvg(),
        quadratics((1.0, 1.0), (1.0, 3.0), (1.0, 5.0)),
        model=Point(),
        loss=quadratic,
        optimizer=SGD(lr=0.5),
        local=Phase("train", epochs=1),
        batch_size=1,
        cohort=2,
        rounds=1,
    )
    people = replace(quadratics((1.0, 1.0), (1.0, 3.0), (1.0, 5.0)), newcomers=1)

    def test_scores_before_and_after_two_epochs(self):
        # round 1 from w = 0: 0.5 and 1.5, mean 1. The newcomer: (1 - 5)^2 / 2 = 8; then 1 -> 3 -> 4, (4 - 5)^2 / 2
        server, records = run(self.plan, self.people, splits=("test",), adapt_epochs=2)
        assert server.state["weights"]["w"].item() == 1.0
        new = {(s.client, s.domain, s.point): (s.value, s.n) for s in records[-1].scores if s.newcomer}
        assert new == {(2, "d2", "downloaded"): (8.0, 1), (2, "d2", "adapted"): (0.5, 1)}
        old = {s.client: s.value for s in records[-1].scores if s.point == "global"}
        assert old == {0: 0.0, 1: 2.0}

    def test_only_once_and_in_the_end(self):
        _, records = run(replace(self.plan, rounds=3), self.people, splits=("test",))
        assert [any(s.newcomer for s in record.scores) for record in records] == [False, False, True]

    def test_clients_have_the_numbers_of_the_partition(self):
        clients = self.people.clients
        mixed = replace(self.people, clients=(clients[0], clients[2], clients[1]))  # 0 and 2 train, 1 comes later
        _, records = run(self.plan, mixed, splits=("test",), points=("global", "trained"))
        found = {
            (s.client, s.newcomer, s.point) for s in records[-1].scores if s.metric == "loss" and s.split == "test"
        }
        trained = {(i, False, p) for i in (0, 2) for p in ("global", "trained")}
        assert found == trained | {(1, True, "downloaded"), (1, True, "adapted")}

    def test_selected_clients_alone(self):
        plan = replace(self.plan, cohort=1, rounds=4)
        server, records = run(plan, self.people, splits=("test",), clients="selected")
        for record in records:
            assert {s.client for s in record.scores if s.point == "global"} == set(server.sample(record.round))


class TestWhatTheyReceive:
    def test_dbe_hands_out_the_consensus_and_collects_no_mean(self):
        people, trained = replace(blobs(4), newcomers=1), []

        class Watched(DBE):
            def phases(self, ctx):
                found = super().phases(ctx)
                if ctx.newcomer and found:
                    trained.append(ctx.stage)
                return found

        plan = blueprint(Watched(kappa=1.0), people, cohort=3)
        server, _ = run(plan, people, points=("downloaded",))
        kept = server.fleet.save()[3]["weights"]
        assert torch.equal(kept[CONSENSUS], server.state["consensus"])
        assert kept[CONSENSUS].abs().sum() > 0
        assert not kept[BIAS].any()
        assert trained == ["final"]  # the adaptation alone

    def test_fedfomo_sends_the_first_models(self):
        people = replace(blobs(4), newcomers=1)
        server, _ = run(blueprint(FedFomo(models=2), people, cohort=3), people, points=("downloaded",))
        assert server.algorithm.chosen(server.state, 3) == [0, 1]
