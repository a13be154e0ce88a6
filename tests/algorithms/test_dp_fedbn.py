"""DP-FedBN: clipping, noise, how the budget is split, and sampling without replacement."""

import pytest
import torch
from scipy import stats

from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithms.common.clipped_updates import clipped_update
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.dp_fedbn import DPFedBN
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbn import FedBN
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Evaluation, Server


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values()])


@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_updates_are_clipped_in_l1_and_every_coordinate_gets_noise(clip):
    people, algorithm = blobs(), DPFedBN(clip=clip, epsilon=8.0)
    plan = blueprint(algorithm, people, rounds=4)
    ctx = plan.context(people, "cpu").at(client=0, cohort=(0, 1, 2, 3), round=1)
    torch.manual_seed(0)
    server, client = algorithm.init(ctx), algorithm.join(ctx)
    down = algorithm.broadcast(ctx, server)
    work = algorithm.start(ctx, client, down)
    work["weights"] = {name: v + 0.1 if v.is_floating_point() else v for name, v in work["weights"].items()}
    base = flat(down["weights"])
    sent = torch.stack([flat(algorithm.finish(ctx, work, client, down, None)[1]["weights"]) for _ in range(100)])
    whole = 0.1 * len(base)  # L1 norm of the update
    clean = base + 0.1 * min(1.0, clip / whole)
    scale = 2 * clip / (8.0 / 4)
    assert stats.kstest((sent - clean).flatten().numpy(), stats.laplace(scale=scale).cdf).pvalue > 0.001
    assert not any(name.startswith("body.1.") for name in down["weights"])


@pytest.mark.parametrize("order", [1, 2])
def test_the_norm_of_a_long_update_keeps_to_the_bound(order):
    """A norm summed in float32 is too small: over so many numbers by 1% to 2% in L1, and a little in L2."""
    torch.manual_seed(0)
    sent = {"a": torch.randn(12_000_000), "b": torch.full((2_000_000,), 1e-3), "count": torch.tensor(3)}
    base = {name: torch.zeros_like(value) for name, value in sent.items()}
    clipped = clipped_update(sent, base, bound=2.0, order=order)
    assert set(clipped) == {"a", "b"}
    assert {value.dtype for value in clipped.values()} == {torch.float32}
    norm = flat(clipped).double().norm(order).item()
    assert 2.0 * (1 - 1e-5) <= norm <= 2.0 * (1 + 1e-5)


def test_with_an_endless_budget_it_is_fedbn():
    people = blobs()
    ours, theirs = (
        simulate(blueprint(a, people), people)[0].state["weights"]
        for a in (DPFedBN(epsilon=1e15, clip=1e3), FedBN(weighting="equal"))
    )
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cohort", "rounds", "expected"),
    [(4, 4, [2, 4, 6, 8]), (1, 8, [4, 4, 4, 4, 8, 8, 8, 8]), (2, 3, [4, 4, 8]), (3, 2, [4, 8])],
)
def test_the_budget_is_split_over_a_clients_participations(cohort, rounds, expected):
    people = blobs()
    _, records = simulate(blueprint(DPFedBN(epsilon=8.0), people, cohort=cohort, rounds=rounds), people)
    assert [record.epsilon for record in records] == pytest.approx(expected)


def cohorts(algorithm, cohort, rounds, seed=0):
    people = blobs(7)
    plan = blueprint(algorithm, people, cohort=cohort, seed=seed)
    server = Server(plan, people, LocalFleet(plan, people), Evaluation())
    return [server.sample(number) for number in range(1, rounds + 1)]


def test_no_client_is_sampled_twice_before_all_have_taken_part():
    drawn = cohorts(DPFedBN(), 2, 60)
    for first in range(0, 60, 3):
        clients = [i for cohort in drawn[first : first + 3] for i in cohort]
        assert len(set(clients)) == 6
    assert all(list(cohort) == sorted(cohort) for cohort in drawn)
    assert {i for cohort in drawn for i in cohort} == set(range(7))
    assert drawn != cohorts(DPFedBN(), 2, 60, seed=1)
    repeats = [len({i for cohort in cohorts(FedAvg(), 2, 60)[k : k + 3] for i in cohort}) for k in range(0, 60, 3)]
    assert min(repeats) < 6  # other methods sample each cohort independently


def test_notes():
    people = blobs()
    ctx = blueprint(DPFedBN(), people, rounds=10).context(people, "cpu").at(cohort=(0,))
    line, _ = DPFedBN(epsilon=6.0, clip=2.0).notes(ctx, None)
    assert line == "ε=6 per client, 2 per participation: Laplace noise of scale 2 on every weight"
    _, sizes, _ = DPFedBN(weighting="examples").notes(ctx, None)
    assert sizes == "the numbers of examples are sent in clear, for the weights of the mean: ε does not cover them"


def test_a_wrapper_that_sends_more_gives_no_guarantee():
    people = blobs()
    for mr, expected in ((True, None), (False, 4.0)):
        algorithm = DBE(base=DPFedBN(epsilon=8.0), kappa=1.0, mr=mr)
        _, records = simulate(blueprint(algorithm, people), people)
        assert next(record for record in records if record.round == 1).epsilon == expected
