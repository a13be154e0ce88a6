"""Mixup: what the base is given, and that the base trains on it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, net, simulate
from helpers.reference import LR, assert_weights, cross_entropy, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.mixup import Mixup
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment
from rayfed.core.rng import seed_torch
from rayfed.core.task import Batch
from rayfed.experiments.config import build_algorithm


def context(algorithm):
    return blueprint(algorithm, blobs()).context(blobs(), "cpu")


def test_a_batch_is_mixed_with_a_permutation_of_itself_by_one_share():
    mixup = Mixup(alpha=0.7)
    ctx = context(mixup)
    x, y = torch.randn(9, 6), torch.tensor([0, 1, 2] * 3)
    torch.manual_seed(4)
    found = mixup.prepare(ctx, Batch(x, y))
    torch.manual_seed(4)
    share, other = float(torch.distributions.Beta(0.7, 0.7).sample()), torch.randperm(9)
    torch.testing.assert_close(found.x, share * x + (1 - share) * x[other])
    torch.testing.assert_close(found.y, share * F.one_hot(y, 3) + (1 - share) * F.one_hot(y[other], 3))
    assert sorted(other.tolist()) == list(range(9)) != other.tolist()
    logits = torch.randn(9, 3)
    both = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])
    torch.testing.assert_close(F.cross_entropy(logits, found.y), both)


def test_shares_are_of_the_beta_distribution():
    mixup = Mixup(alpha=0.2)
    ctx, batch = context(mixup), Batch(torch.eye(2), torch.tensor([0, 1]))
    torch.manual_seed(0)
    drawn = [mixup.prepare(ctx, batch).y[0, 0].item() for _ in range(2000)]
    mixed = np.array([share for share in drawn if share not in (0.0, 1.0)])  # half of the pairs are of one with itself
    assert abs(np.mean(np.minimum(mixed, 1 - mixed) < 0.05) - 0.565) < 0.05  # P(min(λ, 1−λ) < 0.05), Beta(0.2, 0.2)


def test_a_round_by_hand():
    people, model = population(), net()
    server = run(Mixup(), people, model, steps=2, rounds=1)
    locals_ = []
    for i in range(3):
        local = descend(model, *data(people, i), 0)
        x, y = data(people, i)
        rows = simulated_rows(people, model, i)
        sgd = torch.optim.SGD(local.parameters(), lr=LR)
        for step, some in enumerate(rows):
            seed_torch(0, "batch", Moment("round", 1), phase=0, client=i, step=step)
            batch = Mixup().prepare(server.ctx, Batch(x[some], y[some]))
            local.zero_grad()
            cross_entropy(local, *batch).backward()
            sgd.step()
        locals_.append(local)
    assert_weights(server.state["weights"], mean(locals_, shares(people)))


def simulated_rows(people, model, client):
    from rayfed.core.rng import generator

    rng = generator(0, "batches", Moment("round", 1), phase=0, client=client)
    return [torch.from_numpy(rng.permutation(len(people.clients[client].train))) for _ in range(2)]


def test_noise_is_the_same_at_any_width_and_differs_between_clients_and_rounds():
    seen = []

    class Spy(FedAvg):
        def step(self, ctx, work, down, batch):
            seen.append(batch.y.max(1).values.min().item())  # λ or 1 − λ
            return super().step(ctx, work, down, batch)

    people = population(sizes=(10, 10))
    simulate(plan(Mixup(base=Spy()), people, net(), steps=2), people)
    assert len(set(seen)) == 8
    narrow, wide = (
        simulate(plan(Mixup(), people, net(), vmap_clients=w, batch_size=10), people)[0].state for w in (1, 2)
    )
    for name, value in narrow["weights"].items():
        torch.testing.assert_close(value, wide["weights"][name], rtol=1e-4, atol=1e-5)


def test_the_base_decides_all_else():
    assert Mixup(base=Scaffold()).averaged == ("delta", "delta_c", "buffers")
    people = population()
    server = run(Mixup(base=Scaffold()), people, net())
    assert set(server.state) == {"weights", "c"}
    plain = run(Scaffold(), people, net())
    assert not torch.equal(plain.state["weights"]["fc.bias"], server.state["weights"]["fc.bias"])


@pytest.mark.parametrize(("alpha", "beyond", "words"), [(1e-6, 1e-7, "at least 1e-06"), (1e6, 1e7, "at most 1000000")])
def test_shares_at_the_bounds_of_alpha(alpha, beyond, words):
    mixup = build_algorithm({"name": "mixup", "alpha": alpha}, where="algorithm")
    ctx, batch = context(mixup), Batch(torch.eye(2), torch.tensor([0, 1]))
    shares = torch.cat([mixup.prepare(ctx, batch).y[:, 0] for _ in range(500)])
    assert 0 <= shares.min() <= shares.max() <= 1
    with pytest.raises(UsageError, match=rf"^algorithm.alpha={beyond}: must be {words}"):
        build_algorithm({"name": "mixup", "alpha": beyond}, where="algorithm")
