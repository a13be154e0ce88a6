"""FedDebias with mixtures of local data and a proxy's means (Eq. 4 and 6), and with its projector in the extractor."""

import numpy as np
import pytest
import torch

from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithms.feddebias import FedDebias, proxy_means
from rayfed.algorithms.mixup import Mixup
from rayfed.core.errors import UsageError
from rayfed.core.task import InputSpec
from rayfed.data.clients import Client, Examples
from rayfed.data.population import Population


def mixing(**options):
    return FedDebias(**({"widths": [7, 5], "pseudo": "mixture", "proxy": "noise"} | options))


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


def test_refusals():
    with pytest.raises(UsageError, match=r"^algorithm.proxy=photographs: this proxy consists of images"):
        blueprint(mixing(proxy="photographs"), blobs()).check(blobs())
    images = Examples(np.zeros((10, 1, 4, 4), np.uint8), np.zeros(10, np.int64))
    pictures = Population("pictures", (Client(0, "d", images, images, images),), 2, (1, 4, 4))
    with pytest.raises(UsageError, match=r"^data.name=mnits: .*mnist"):
        blueprint(mixing(proxy="mnits"), pictures).check(pictures)
    words = Examples(np.zeros((10, 5), np.int64), np.zeros(10, np.int64))
    texts = Population("texts", (Client(0, "d", words, words, words),), 2, (5,))
    for algorithm in (FedDebias(), Mixup()):
        with pytest.raises(UsageError, match=rf"^algorithm.name={algorithm.name}: needs continuous inputs"):
            blueprint(algorithm, texts).check(texts)
