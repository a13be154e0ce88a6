"""Mixup: what the base is given, and that the base trains on it. FedMix: its loss by hand, and the way of the means."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.federations import blobs, blueprint, net, simulate
from helpers.reference import LR, assert_weights, cross_entropy, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.fedmix import FedMix
from rayfed.algorithms.mixup import Mixup
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment
from rayfed.core.network import gradients
from rayfed.core.rng import Streams, generator
from rayfed.core.task import Batch
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan


class ToPixels(nn.Linear):
    """Three pixels of two classes, [n, 2, 3]."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        return super().forward(x).view(-1, 2, 3)


def bce_of_ints(outputs, y):
    return F.binary_cross_entropy_with_logits(outputs, y.float().view_as(outputs))


def mse_of_ints(outputs, y):
    return F.mse_loss(outputs, y.float().view_as(outputs))


def squared_of_first_label(outputs, y):
    return (outputs[:, 0] - y.view(len(y), -1)[:, 0]).square().mean()


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


LABELS = {
    "pixels": (F.cross_entropy, lambda x: (x[:, :3] > 0).long(), lambda: ToPixels(), F.one_hot),
    "one logit": (bce_of_ints, lambda x: (x[:, 0] > 0).long(), lambda: nn.Linear(6, 1), lambda y, _: y),
    "counts": (mse_of_ints, lambda x: (3 * x[:, 0]).long(), lambda: nn.Linear(6, 1), lambda y, _: y),
    "several": (bce_of_ints, lambda x: (x[:, :3] > 0).long(), lambda: nn.Linear(6, 3), lambda y, _: y),
}


@pytest.mark.parametrize("name", ["mixup", "fedmix"])
@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_every_kind_are_mixed(kind, name):
    loss, label, model, bits = LABELS[kind]
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    y = label(x)
    clients = [dict.fromkeys(("train", "test"), (x.numpy(), y.numpy()))] * 2
    config = Config.read({"algorithm.name": name, "local.batch_size": 4})
    plan = make_plan(config, Given(clients=clients, model=model, loss=loss))
    server, _ = simulate(plan.blueprint, plan.population)
    whole = bits(y, 2).float()
    whole = whole.movedim(2, 1) if kind == "pixels" else whole
    if name == "fedmix":
        assert server.state["means"]["y"].shape[1:] == whole.shape[1:]
        torch.testing.assert_close(server.state["means"]["y"][:2].mean(0), whole.mean(0))  # two groups of 10
    else:
        torch.manual_seed(4)
        mixed = plan.config.algorithm.prepare(server.ctx, Batch(x, y)).y
        torch.manual_seed(4)
        share, other = float(torch.distributions.Beta(0.2, 0.2).sample()), torch.randperm(20)
        torch.testing.assert_close(mixed, share * whole + (1 - share) * whole[other])


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (F.nll_loss, np.arange(20) % 3, r"the loss fails on labels \[3, 3\]: "),
        (squared_of_first_label, np.arange(20) % 3, "the loss of unmixed ones is .* as probabilities, not "),
        (F.cross_entropy, np.where(np.arange(20) % 3, 1, -100), "-100 stands for no class"),
    ],
)
def test_a_loss_that_takes_no_mixtures_is_refused(loss, y, message):
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    config = Config.read({"algorithm": {"name": "dbe", "base": "fedmix"}})
    clients = [dict.fromkeys(("train", "test"), (x, y))]
    with pytest.raises(UsageError, match=f"^algorithm.name=dbe: mixes labels, and {message}"):
        make_plan(config, Given(clients=clients, model=lambda: nn.Linear(6, 3), loss=loss))


def test_weights_of_classes_do_not_matter():
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    config = Config.read({"algorithm.name": "mixup", "loss.weight": [1, 5, 9]})
    make_plan(
        config, Given(clients=[dict.fromkeys(("train", "test"), (x, np.arange(20) % 3))], model=lambda: nn.Linear(6, 3))
    )


def test_a_round_of_mixup_by_hand():
    people, model = population(), net()
    server = run(Mixup(), people, model, steps=2, rounds=1)
    locals_ = []
    for i in range(3):
        local = descend(model, *data(people, i), 0)
        x, y = data(people, i)
        rows = itertools.islice(rows_of(i, len(x)), 2)
        sgd = torch.optim.SGD(local.parameters(), lr=LR)
        for step, some in enumerate(rows):
            Streams(0).begin("batch", Moment("round", 1), phase=0, client=i, step=step)
            batch = Mixup().prepare(server.ctx, Batch(x[some], y[some]))
            local.zero_grad()
            cross_entropy(local, *batch).backward()
            sgd.step()
        locals_.append(local)
    assert_weights(server.state["weights"], mean(locals_, shares(people)))


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
def test_a_round_of_fedmix_by_hand(width, steps):
    people, model = population((12, 12, 12)), net(batch_norm=False)
    algorithm = FedMix(lam=0.3, mean_examples=4)
    changes = {"steps": steps, "rounds": 1, "vmap_clients": width}
    changes |= {"batch_size": 12, "drop_last": True}
    server = run(algorithm, people, model, **changes)
    means = server.state["means"]
    assert means["x"].shape == (9, 6)
    locals_ = []
    for i in range(3):
        Streams(0).begin("start", Moment("round", 1), client=i)
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
