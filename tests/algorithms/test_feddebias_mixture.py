"""FedDebias with mixtures of local data and a proxy's means (Eq. 4 and 6), and with its projector in the extractor."""

import numpy as np
import pytest
import torch

from helpers.federations import blobs, blueprint, net, simulate
from helpers.reference import plan, population, run
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.feddebias import FedDebias, proxy_means
from rayfed.algorithms.mixup import Mixup
from rayfed.core.errors import UsageError
from rayfed.core.task import Batch, InputSpec
from rayfed.data.clients import Client, Examples
from rayfed.data.population import Population


def mixing(**options):
    return FedDebias(**({"widths": [7, 5], "pseudo": "mixture", "proxy": "noise"} | options))


def test_pairs_overlap_in_soft_labels_as_mixup_makes_them():
    algorithm, people = mixing(k_mix=2, pseudo_samples=4), blobs()
    ctx = blueprint(algorithm, people).context(people, "cpu").at(client=0, round=1)
    work = {"pseudo": torch.randn(4, 6), "received_weights": ctx.task.initial_weights()}
    batch = Batch(torch.randn(7, 6), torch.rand(7, 3).softmax(1))
    mixed = algorithm.mixed(ctx, work, batch)
    for j in range(7):
        y_p = (1 / 3 + batch.y[(j % 4 + 1) % 7] + batch.y[(j % 4 + 2) % 7]) / 3
        torch.testing.assert_close(mixed["overlap"][j], torch.dot(y_p, batch.y[j]))


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
