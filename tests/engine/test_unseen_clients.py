"""Newcomers: who they are, what they receive, what they are scored at."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.federations import Point, blobs, blueprint, new_server, quadratic, quadratics
from rayfed.algorithm import Phase
from rayfed.algorithms.apfl import APFL
from rayfed.algorithms.dbe import BIAS, CONSENSUS, DBE
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.algorithms.pfedme import PFedMe
from rayfed.core.optim import SGD
from rayfed.data.population import Examples
from rayfed.experiments.plan_data import with_unseen_clients


def run(plan, people, **evaluation):
    server = new_server(plan, people, **evaluation)
    return server, list(server.run())


class TestWho:
    def test_numbers_and_shares(self):
        for asked, count in ((0, 0), (3, 3), (0.29, 2), (0.3, 3), (0.0, 0)):
            people = with_unseen_clients(blobs(10), asked, seed=0)
            assert (people.unseen_clients, len(people.participants), len(people.clients)) == (count, 10 - count, 10)

    def test_the_columns_of_all_clients_are_not_copied(self):
        people = blobs(10)
        assert with_unseen_clients(people, 0, seed=0).participants is people.clients
        assert people.clients.select([1, 0]) is not people.clients

    def test_both_groups_keep_their_order_and_everyone_their_number(self):
        people = with_unseen_clients(blobs(10), 4, seed=1)
        early, late = [c.id for c in people.participants], [c.id for c in people.clients[6:]]
        assert early == sorted(early)
        assert late == sorted(late)
        assert sorted(early + late) == list(range(10))
        assert late != [6, 7, 8, 9]

    def test_the_seed_draws_them_and_earlier_draws_leave_no_trace(self):
        drawn = [[c.id for c in with_unseen_clients(blobs(10), 4, seed).clients] for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        again = with_unseen_clients(with_unseen_clients(blobs(10), 5, seed=7), 4, seed=1)
        assert [c.id for c in again.clients] == drawn[0]
        assert [c.id for c in with_unseen_clients(again, 0, seed=1).clients] == list(range(10))


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
    people = replace(quadratics((1.0, 1.0), (1.0, 3.0), (1.0, 5.0)), unseen_clients=1)

    def test_scores_before_and_after_two_epochs(self):
        # round 1 from w = 0: 0.5 and 1.5, mean 1. The newcomer: (1 - 5)^2 / 2 = 8; then 1 -> 3 -> 4, (4 - 5)^2 / 2
        server, records = run(self.plan, self.people, splits=("test",), adapt_epochs=2)
        assert server.state["weights"]["w"].item() == 1.0
        new = {(s.client, s.domain, s.point): (s.value, s.n) for s in records[-1].scores if s.unseen}
        assert new == {(2, "d2", "downloaded"): (8.0, 1), (2, "d2", "adapted"): (0.5, 1)}
        old = {s.client: s.value for s in records[-1].scores if s.point == "global"}
        assert old == {0: 0.0, 1: 2.0}

    def test_clients_have_the_numbers_of_the_partition(self):
        clients = self.people.clients
        mixed = replace(self.people, clients=(clients[0], clients[2], clients[1]))  # 0 and 2 train, 1 comes later
        _, records = run(self.plan, mixed, splits=("test",), points=("global", "trained"))
        found = {(s.client, s.unseen, s.point) for s in records[-1].scores if s.metric == "loss" and s.split == "test"}
        trained = {(i, False, p) for i in (0, 2) for p in ("global", "trained")}
        assert found == trained | {(1, True, "downloaded"), (1, True, "adapted")}

    def test_selected_clients_alone(self):
        plan = replace(self.plan, cohort=1, rounds=4)
        server, records = run(plan, self.people, splits=("test",), clients="selected")
        for record in records:
            assert {s.client for s in record.scores if s.point == "global"} == set(server.sample(record.round))


class TestWhereTheyStart:
    """Personal models of newcomers start from what was learned, not from the untrained weights (DBE, appendix D.4).

    The quadratics from above: w = 0 at first, the newcomer's a = 5, two adaptation steps of 0.5.
    """

    @pytest.mark.parametrize(
        ("algorithm", "start", "end"),
        [
            # w = 1, and v: 1 -> 3 -> 3.5 by the gradient (v - 5) + 0.5 (v - 1)
            (Ditto(mu=0.5), 1.0, 3.5),
            # v and w: 1 -> 3 -> 4, each by its own gradient, and their mean
            (APFL(alpha=0.5, adapt_alpha=False), 1.0, 4.0),
            # by the gradient at (v + w)/2: w: 1 -> 3 -> 4 by its own, v: 1 -> 2 -> 2.625 by half of -4 and of -2.5
            (APFL(alpha=0.5, adapt_alpha=False, variant="paper"), 1.0, (4 + 2.625) / 2),
            # round 1: v = 0.5 and 1.5, w = 0.25 and 0.75, mean 0.5. Then v: 0.5 -> 2.75, w: 0.5 -> 1.625, v -> 3.3125
            (PFedMe(lam=1.0, inner_steps=1, personal_lr=0.5, decay=0.0), 0.5, 3.3125),
        ],
    )
    def test_by_hand(self, algorithm, start, end):
        plan, people = replace(TestQuadratics.plan, algorithm=algorithm), TestQuadratics.people
        server, records = run(plan, people, splits=("test",), points=("downloaded",), adapt_epochs=2)
        assert server.state["weights"]["w"].item() == start
        found = {s.point: s.value for s in records[-1].scores if s.unseen}
        assert found == {"downloaded": (start - 5) ** 2 / 2, "adapted": pytest.approx((end - 5) ** 2 / 2)}

    def test_fedfomos_from_the_mixture_of_what_it_is_sent(self):
        # each has its example twice: one to train on, and one that rates
        trains = [client.train for client in TestQuadratics.people.clients]
        twice = [Examples(np.repeat(train.x, 2, 0), np.repeat(train.y, 2, 0)) for train in trains]
        clients = [replace(c, train=t) for c, t in zip(TestQuadratics.people.clients, twice, strict=True)]
        people = replace(TestQuadratics.people, clients=tuple(clients))
        plan = replace(TestQuadratics.plan, algorithm=FedFomo())
        server, records = run(plan, people, splits=("test",), points=("downloaded",), adapt_epochs=2)
        assert [model["w"].item() for model in server.state["models"]] == [0.5, 1.5]
        # its losses: 12.5 at 0, 10.125 and 6.125 at these two, so ratings of 2.375/0.5 and 6.375/1.5
        start = (4.75 * 0.5 + 4.25 * 1.5) / 9
        found = {s.point: s.value for s in records[-1].scores if s.unseen}
        assert found["downloaded"] == pytest.approx((start - 5) ** 2 / 2, rel=1e-4)
        assert found["adapted"] == pytest.approx(((start - 5) / 4) ** 2 / 2, rel=1e-4)


class TestWhatTheyReceive:
    def test_dbe_hands_out_the_consensus_and_collects_no_mean(self):
        people, trained = replace(blobs(4), unseen_clients=1), []

        class Watched(FedAvg):
            def step(self, ctx, work, down, batch):
                if ctx.unseen:
                    trained.append(ctx.stage)
                return super().step(ctx, work, down, batch)

        plan = blueprint(DBE(base=Watched(), kappa=1.0), people, cohort=3)
        server, _ = run(plan, people, points=("downloaded",))
        kept = server.fleet.states[3]["weights"]
        assert torch.equal(kept[CONSENSUS], server.state["consensus"])
        assert kept[CONSENSUS].abs().sum() > 0
        assert not kept[BIAS].any()
        assert set(trained) == {"final"}  # the adaptation alone

    def test_fedfomo_sends_the_first_models(self):
        people = replace(blobs(4), unseen_clients=1)
        server, _ = run(blueprint(FedFomo(models=2), people, cohort=3), people, points=("downloaded",))
        assert server.algorithm.best_rated(server.state, 3) == [0, 1]
