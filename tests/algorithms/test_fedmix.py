"""FedMix: its loss by hand, and the means' way."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net, simulate
from helpers.reference import LR, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedmix import FedMix
from rayfed.core.ids import Moment
from rayfed.core.network import gradients
from rayfed.core.rng import generator, seed_torch
from rayfed.core.task import Batch
from rayfed.core.trees import only

SIZES = (8, 12, 20)


def literal(model, x, y, means, lam):
    """Eq. 3, one example after the other; the network has no batch norm."""
    losses = []
    for j in range(len(x)):
        u = ((1 - lam) * x[j : j + 1]).requires_grad_()
        logits = model(u)
        loss = F.cross_entropy(logits, y[j : j + 1])
        (slope,) = torch.autograd.grad(loss, u, create_graph=True)
        other = -(means["y"][j] * F.log_softmax(logits[0], 0)).sum()
        losses.append((1 - lam) * loss + lam * other + lam * (slope[0] * means["x"][j]).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_round_by_hand(width, steps):
    people, model = population((12, 12, 12)), net(batch_norm=False)
    algorithm = FedMix(lam=0.3, mean_examples=4)
    changes = {"steps": steps, "rounds": 1, "vmap_clients": width}
    changes |= {"batch_size": 12, "drop_last": True}
    server = run(algorithm, people, model, **changes)
    means = server.state["means"]
    assert means["x"].shape == (9, 6)
    locals_ = []
    for i in range(3):
        seed_torch(0, "start", Moment("round", 1), client=i)
        order = torch.randperm(9)
        x, y = data(people, i)
        local = descend(model, x, y, 0)
        sgd = torch.optim.SGD(local.parameters(), lr=LR)
        rng = rows_of(i, 12)
        for step in range(steps):
            rows = next(rng)
            place = order[(torch.arange(12) + 12 * step) % 9]
            local.zero_grad()
            literal(local, x[rows], y[rows], {k: v[place] for k, v in means.items()}, 0.3).backward()
            sgd.step()
        locals_.append(local)
    assert_weights(server.state["weights"], mean(locals_, shares(people)), atol=1e-5)


def rows_of(client, size):
    rng = generator(0, "batches", Moment("round", 1), phase=0, client=client)
    while True:
        yield torch.from_numpy(rng.permutation(size))


def test_means_are_of_disjoint_examples_and_of_their_labels():
    people = population()
    server, records = simulate(plan(FedMix(mean_examples=4), people, net()), people)
    means, place = server.state["means"], 0
    for i, size in enumerate(SIZES):
        x, y = data(people, i)
        some = slice(place, place := place + size // 4)
        torch.testing.assert_close(means["x"][some].mean(0), x.mean(0))  # sizes are multiples of 4
        torch.testing.assert_close(means["y"][some].mean(0), F.one_hot(y, 3).float().mean(0))
    sent = 10 * (6 + 3) * 4
    assert (records[0].bytes_up, records[0].bytes_down) == ({"means": sent}, {"means": 3 * sent})
    assert set(records[1].bytes_up) == set(records[1].bytes_down) == {"weights"}
    assert torch.equal(server.fleet.states[1]["means"]["x"], means["x"])


def test_fewer_means_than_examples_are_shared():
    people = population((12, 12))
    algorithm = FedMix(means_per_step=3, mean_examples=4, lam=0.3)
    ctx = plan(algorithm, people, net(batch_norm=False)).context(people, "cpu").at(client=0, step=1)
    means = {"x": torch.randn(6, 6), "y": torch.rand(6, 3).softmax(1)}
    server = algorithm.init(ctx)
    work = algorithm.start(ctx, algorithm.join(ctx) | {"means": means}, only(server, ("weights",)))
    model, (x, y) = net(batch_norm=False), data(people, 0)
    rows = work["order"][3 + torch.arange(12) % 3]
    found, _ = algorithm.loss(ctx, work["weights"], work, {}, Batch(x, y))
    wanted = literal(model, x, y, {k: v[rows] for k, v in means.items()}, 0.3)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_a_wrappers_term_counts_in_full_and_sees_the_mixed_inputs_output():
    lam, algorithm = 0.3, FedMix(lam=0.3, mean_examples=4)
    ctx = plan(algorithm, population(), net(batch_norm=False)).context(population(), "cpu").at(client=0)
    torch.manual_seed(0)
    means = {"x": torch.randn(6, 6), "y": torch.rand(6, 3).softmax(1)}
    work, (x, y) = {"order": torch.randperm(6), "means": means}, data(population(), 0)
    weights = ctx.task.initial_weights()

    def term(loss, weights, output):
        return loss + 1 + output.features.square().mean(), output

    def gradient(task):
        def loss(trained):
            value, output = algorithm.loss(ctx.at(task=task), trained, work, {}, Batch(x, y))
            return value, output.buffers

        return gradients(loss, weights)

    plain, value, _ = gradient(ctx.task)
    more, completed, _ = gradient(ctx.task.with_loss_term(term))
    features = net(batch_norm=False).features((1 - lam) * x)
    assert (completed - value).item() == pytest.approx(1 + features.square().mean().item(), rel=1e-5)
    model = net(batch_norm=False)
    model.features((1 - lam) * x).square().mean().backward()
    for name, p in model.body.named_parameters():
        torch.testing.assert_close(more[f"body.{name}"] - plain[f"body.{name}"], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_under_dbe_the_running_mean_is_of_the_mixed_inputs(width):
    people, lam = population((12, 12, 12)), 0.3
    algorithm = DBE(base=FedMix(lam=lam, mean_examples=4), kappa=2.0, mu=1.0)
    changes = {"batch_size": 12, "steps": 1, "rounds": 1, "vmap_clients": width}
    server = run(algorithm, people, net(batch_norm=False), **changes)
    for i, state in server.fleet.states.items():
        seen = net(batch_norm=False).features((1 - lam) * data(people, i)[0]).mean(0)
        torch.testing.assert_close(state["weights"]["dbe.mean"], seen.detach())
