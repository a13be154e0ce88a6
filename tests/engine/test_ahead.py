"""Where a GPU is busy, the next block of clients is launched before the results of a block are read."""

import pytest

from helpers.algorithm_cases import MAIN_CASES, algorithm_of, everything, people_of, plan_of
from helpers.federations import blobs, blueprint, net
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import Diverged
from rayfed.core.trees import nbytes, tree_map
from rayfed.engine.host import LocalFleet
from rayfed.engine.purity import facts
from rayfed.engine.server import Evaluation, Server

CALLS = []


class Noted(FedAvg):
    """Notes its hooks with a client."""

    def start(self, ctx, client, down):
        CALLS.append(f"start {ctx.client}")
        return super().start(ctx, client, down)

    def finish(self, ctx, work, client, down, data):
        CALLS.append(f"finish {ctx.client}")
        return super().finish(ctx, work, client, down, data)


def ran(plan, people, room, points=()):
    fleet = LocalFleet(plan, people)
    assert fleet.host.room_ahead == 0  # on a CPU
    fleet.host.room_ahead = room
    server = Server(plan, people, fleet, Evaluation(points=points))
    scores = [record.scores for record in server.run()]
    return facts(everything(server)), scores


@pytest.mark.parametrize("width", [1, pytest.param(3, marks=pytest.mark.slow)])
@MAIN_CASES
def test_every_method_has_the_same_state_and_scores(case, width):
    plan, people = plan_of(case, vmap_clients=width, rounds=2), people_of(algorithm_of(case))
    points = ("trained", "adapted")
    assert ran(plan, people, float("inf"), points) == ran(plan, people, 0, points)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (1, "start 0, start 1, finish 0, start 2, finish 1, start 3, finish 2, finish 3"),
        (2, "start 0, start 1, start 2, start 3, finish 0, finish 1, finish 2, finish 3"),
        (3, "start 0, start 1, start 2, start 3, finish 0, finish 1, finish 2, finish 3"),
    ],
)
def test_the_next_block_starts_before_a_block_ends_if_both_fit(width, expected):
    people = blobs()
    plan = blueprint(Noted(), people, model=net(), vmap_clients=width, rounds=1)
    weights = plan.context(people, "cpu").task.initial_weights()
    CALLS.clear()
    ran(plan, people, width * nbytes(weights) + 100)
    assert ", ".join(CALLS) == expected


def test_a_block_that_is_too_large_ends_before_the_next_one_starts():
    people = blobs()
    plan = blueprint(Noted(), people, model=net(), vmap_clients=2, rounds=1)
    weights = plan.context(people, "cpu").task.initial_weights()
    CALLS.clear()
    ran(plan, people, 2 * nbytes(weights))
    assert CALLS == ["start 0", "start 1", "finish 0", "finish 1", "start 2", "start 3", "finish 2", "finish 3"]


class Explodes(FedAvg):
    """Its second client diverges."""

    def start(self, ctx, client, down):
        factor = float("inf") if ctx.client == 1 else 1.0
        work = super().start(ctx, client, down)
        return work | {"weights": tree_map(lambda w: w * factor, work["weights"])}


@pytest.mark.parametrize("room", [0, float("inf")])
def test_the_client_that_diverged_is_named(room):
    people = blobs()
    plan = blueprint(Explodes(), people, model=net(), vmap_clients=1, rounds=1)
    with pytest.raises(Diverged, match="round 1, client 1: training loss is nan"):
        ran(plan, people, room)
