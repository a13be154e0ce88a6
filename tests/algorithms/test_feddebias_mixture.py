"""FedDebias with mixtures of local data and a proxy's means (Eq. 4 and 6), and with its projector in the extractor."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, net, simulate
from helpers.reference import LR, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.feddebias import FedDebias
from rayfed.algorithms.feddebias.pseudo_data import mixture, proxy_means
from rayfed.algorithms.mixup import Mixup
from rayfed.core.errors import UsageError
from rayfed.core.ids import Moment
from rayfed.core.rng import generator, seed_torch
from rayfed.core.task import Batch, InputSpec
from rayfed.data.clients import Client, Examples
from rayfed.data.population import Population


def mixing(**options):
    return FedDebias(**({"widths": [7, 5], "pseudo": "mixture", "proxy": "noise"} | options))


def test_mixture_of_one():
    proxy, batch = torch.randn(2, 6), Batch(torch.randn(3, 6), torch.tensor([0, 2, 1]))
    x, y = mixture(proxy, batch, 1, 10)
    torch.testing.assert_close(x, (proxy + batch.x[[1, 2]]) / 2)
    assert y[0].tolist() == pytest.approx([0.05, 0.05, 0.55] + [0.05] * 7)  # with row 1, of class 2
    assert y[1].tolist() == pytest.approx([0.05, 0.55] + [0.05] * 8)


def test_mixture_of_several_goes_round_the_batch():
    proxy, batch = torch.randn(4, 6), Batch(torch.randn(3, 6), torch.tensor([0, 2, 1]))
    x, y = mixture(proxy, batch, 2, 3)
    torch.testing.assert_close(x[2], (proxy[2] + batch.x[0] + batch.x[1]) / 3)
    torch.testing.assert_close(x[3], (proxy[3] + batch.x[1] + batch.x[2]) / 3)
    assert y[2].tolist() == pytest.approx([4 / 9, 1 / 9, 4 / 9])
    torch.testing.assert_close(y.sum(1), torch.ones(4))


@pytest.mark.parametrize("k_mix", [0, 1, 2])
@pytest.mark.parametrize("samples", [4, 10, 13])
@pytest.mark.parametrize(("width", "soft_labels"), [(1, False), (3, False), (1, True)])
def test_two_steps_by_hand(k_mix, samples, width, soft_labels):
    """With soft labels: under Mixup, whose x are the local x and whose y are in ⟨ỹ_p, y⟩."""
    lam, mu = 0.3, 0.8
    people, model = population((10, 10, 10)), net()
    algorithm = mixing(lam=lam, mu=mu, tau1=1.5, tau2=0.7, k_mix=k_mix, pseudo_samples=samples, transfer="once")
    algorithm = Mixup(base=algorithm, alpha=1.0) if soft_labels else algorithm
    changes = {"batch_size": 10, "drop_last": True, "vmap_clients": width, "rounds": 1}
    server = run(algorithm, people, model, **changes)
    start = simulate(plan(algorithm, people, model, **(changes | {"rounds": 1, "steps": 1})), people)[0]
    proxy = server.state["pseudo"]
    assert torch.equal(start.state["pseudo"], proxy)
    theta_0 = first_projector(algorithm, people, model)
    models, thetas = [], []
    for i in range(3):
        x, y = data(people, i)
        local, received, theta = descend(model, x, y, 0), descend(model, x, y, 0), mlp([8, 7, 5])
        theta.load_state_dict(theta_0)
        rng = generator(0, "batches", Moment("round", 1), phase=0, client=i)
        for step in range(2):
            rows = torch.from_numpy(rng.permutation(10))
            some, labels = x[rows], F.one_hot(y[rows], 3).float()
            if soft_labels:
                seed_torch(0, "batch", Moment("round", 1), phase=0, client=i, step=step)
                some, labels = Mixup(alpha=1.0).prepare(server.ctx, Batch(some, labels))
                assert 0 < labels[labels < 1].max() < 1
            x_p, y_p = proxy, torch.full((samples, 3), 1 / 3)
            if k_mix:
                partners = [[(j + k) % 10 for k in range(1, k_mix + 1)] for j in range(samples)]
                x_p = torch.stack([(proxy[j] + some[partners[j]].sum(0)) / (k_mix + 1) for j in range(samples)])
                y_p = torch.stack([(1 / 3 + labels[partners[j]].sum(0)) / (k_mix + 1) for j in range(samples)])

            def con(features_p, features, received=received, x_p=x_p, y_p=y_p, theta=theta, labels=labels):
                anchors, losses = received.features(x_p).detach(), []
                for j in range(10):
                    a, g, own = features_p[j % samples], anchors[j % samples], features[j]
                    corrected = a - torch.dot(y_p[j % samples], labels[j]) * own if k_mix else a
                    plus = F.cosine_similarity(theta(a), theta(g), 0)
                    minus = F.cosine_similarity(theta(corrected), theta(own), 0)
                    losses.append(F.softplus(0.7 * minus - 1.5 * plus))
                return torch.stack(losses).mean()

            value = con(*(descend(local, x, y, 0).features(part).detach() for part in (x_p, some)))
            with torch.no_grad():
                for p, g in zip(theta.parameters(), torch.autograd.grad(value, list(theta.parameters())), strict=True):
                    p.add_(LR * g)
            features = local.features(some)
            statistics = {name: buffer.clone() for name, buffer in local.named_buffers()}
            features_p = local.features(x_p)
            loss = F.cross_entropy(local.head(features), labels) + mu * con(features_p, features)
            loss = loss + lam * F.cross_entropy(local.head(features_p), y_p)
            grads = torch.autograd.grad(loss, list(local.parameters()))
            with torch.no_grad():
                for p, g in zip(local.parameters(), grads, strict=True):
                    p.sub_(LR * g)
            local.load_state_dict(local.state_dict() | statistics)
        models.append(local)
        thetas.append(theta)
    assert_weights(server.state["weights"], mean(models, shares(people)), atol=2e-5)
    assert_weights(server.state["projector"], mean(thetas, shares(people)), atol=2e-5)


def first_projector(algorithm, people, model):
    ctx = plan(algorithm, people, model).context(people, "cpu")
    seed_torch(0, "init")
    return algorithm.init(ctx)["projector"]


def test_no_client_data_leaves_with_mixtures():
    people = blobs()
    server, records = simulate(blueprint(mixing(pseudo_samples=6), people, rounds=3), people)
    assert [record.stage for record in records] == ["round"] * 3
    for record in records:
        assert record.bytes_down["pseudo"] == 4 * 6 * 6 * 4
        assert set(record.bytes_up) == {"weights", "projector"}
    once, records = simulate(blueprint(mixing(pseudo_samples=6, transfer="once"), people, rounds=3), people)
    assert [(record.stage, record.bytes_down.get("pseudo")) for record in records] == [
        ("setup", 4 * 6 * 6 * 4),
        *[("round", None)] * 3,
    ]
    assert torch.equal(once.fleet.states[0]["pseudo"], once.state["pseudo"])
    assert not torch.equal(server.state["pseudo"], once.state["pseudo"])


INPUTS = InputSpec((3, 28, 28), (0.5,) * 3, (0.25,) * 3)


def test_photographs():
    torch.manual_seed(0)
    one, means = (proxy_means("photographs", INPUTS, 12, size) for size in (1, 100))
    assert means.shape == (12, 3, 28, 28)
    assert -2 <= one.min() < one.max() <= 2  # (x − 0.5)/0.25 of [0, 1]
    assert means.std(0).mean() < 0.3 * one.std(0).mean()
    assert not torch.equal(one[0], one[1])
    grey = proxy_means("photographs", InputSpec((1, 8, 8), (0.0,), (1.0,)), 3, 2)
    assert grey.shape == (3, 1, 8, 8)
    assert 0 <= grey.min() < grey.max() <= 1


def test_a_data_set_as_proxy():
    torch.manual_seed(0)
    found = proxy_means("mini_digits", InputSpec((1, 14, 14), (0.0,), (1.0,)), 3, 5)
    assert found.shape == (3, 1, 14, 14)
    assert 0 <= found.min() < found.max() <= 1


def test_refusals():
    with pytest.raises(UsageError, match=r"^algorithm.proxy=photographs: this proxy consists of images"):
        blueprint(mixing(proxy="photographs"), blobs()).check(blobs())
    images = Examples(np.zeros((10, 1, 4, 4), np.uint8), np.zeros(10, np.int64))
    pictures = Population("pictures", (Client(0, "d", images, images, images),), 2, (1, 4, 4))
    with pytest.raises(UsageError, match=r"^algorithm.proxy=mnits: use photographs, noise or the name of .*mnist"):
        blueprint(mixing(proxy="mnits"), pictures).check(pictures)
    words = Examples(np.zeros((10, 5), np.int64), np.zeros(10, np.int64))
    texts = Population("texts", (Client(0, "d", words, words, words),), 2, (5,))
    for algorithm in (FedDebias(), Mixup()):
        with pytest.raises(UsageError, match=rf"^algorithm.name={algorithm.name}: needs continuous inputs"):
            blueprint(algorithm, texts).check(texts)


def test_projector_in_extractor_is_fedavg_on_a_longer_model():
    people, model = population(), net()
    algorithm = FedDebias(lam=0.0, mu=0.0, projector_in_extractor=True, widths=[7, 5])
    built = plan(algorithm, people, model)
    task = built.context(people, "cpu").task
    assert task.feature_shape == (5,)
    assert not any(name.startswith("model.fc") for name in task.initial_weights())
    server, longer = run(algorithm, people, model), run(FedAvg(), people, task.model.module)
    for name, value in longer.state["weights"].items():
        assert torch.equal(server.state["weights"][name], value)
    assert server.state["weights"].keys() == longer.state["weights"].keys()


def test_projector_in_extractor_has_no_adversary_and_follows_the_seed():
    people = blobs()
    server, records = simulate(blueprint(FedDebias(projector_in_extractor=True, widths=[7, 5]), people), people)
    assert "projector" not in server.state
    assert set(records[-1].bytes_up) == {"weights", "means"}
    first, again, other = (
        blueprint(FedDebias(projector_in_extractor=True), people, model=net(seed=seed)).context(people, "cpu").task
        for seed in (0, 0, 1)
    )
    name = "head.weight"
    assert torch.equal(first.initial_weights()[name], again.initial_weights()[name])
    assert not torch.equal(first.initial_weights()[name], other.initial_weights()[name])
