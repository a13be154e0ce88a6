"""FedDebias: its limits, and the way of the pseudo-data. `test_whole_rounds_by_hand.py` has its steps."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers.federations import blobs, blueprint, net, simulate
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.feddebias import FedDebias, draw_owners, proxy_means, sample_means
from rayfed.algorithms.mixup import Mixup
from rayfed.core.errors import UsageError
from rayfed.core.task import InputSpec
from rayfed.data.population import Client, Examples, Population
from rayfed.engine.device_data import Normalise, Part
from rayfed.experiments.checks import check_trial


def small(**options):
    return FedDebias(**({"widths": [7, 5]} | options))


def at_work(algorithm, **changes):
    """(context, what is sent down) of a client in round 1, with five pseudo-examples."""
    people = blobs()
    ctx = blueprint(algorithm, people, **changes).context(people, "cpu").at(client=0, cohort=(0, 1, 2, 3), round=1)
    torch.manual_seed(1)
    return ctx, algorithm.broadcast(ctx, algorithm.init(ctx) | {"pseudo": torch.randn(5, 6)})


def test_local_batch_norm_belongs_to_the_received_extractor():
    ctx, down = at_work(small(), batch_norm="local")
    own = {name: value + 1 for name, value in net().state_dict().items() if name.startswith("body.1.")}
    work = small().start(ctx, {"weights": own}, down)
    assert torch.equal(work["weights"]["body.1.weight"], own["body.1.weight"])
    assert torch.equal(work["received_features"], ctx.task.forward(work["weights"], work["pseudo"]).features)


# Pseudo-data


def test_means_are_of_so_many_normalised_images_of_one_client():
    images = np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1) * 20
    examples = Examples(images, np.zeros(12, np.int64))
    population = Population("p", (Client(0, "d", examples, examples, examples),), 2, (1, 1, 1), (0.5,), (0.25,))
    part = Part(examples, torch.device("cpu"), Normalise(population, torch.device("cpu"), channels_last=True))
    torch.manual_seed(0)
    means = sample_means(part, 3, 10)
    torch.manual_seed(0)
    for mean in means:
        rows = torch.randperm(12)[:10]
        by_hand = ((rows * 20.0 / 255 - 0.5) / 0.25).mean()
        assert mean.shape == (1, 1, 1)
        assert mean.item() == pytest.approx(by_hand.item(), abs=1e-5)
    assert len({round(mean.item(), 5) for mean in means}) == 3
    everything = sample_means(part, 2, 50)  # fewer images than a mean wants: all of them
    assert everything[0].item() == pytest.approx(everything[1].item(), abs=1e-5)


def test_owners_are_uniform_over_the_cohort():
    torch.manual_seed(0)
    owners = draw_owners((1, 4, 7), 3000)
    counts = [(owners == i).sum().item() for i in (1, 4, 7)]
    assert sum(counts) == 3000
    assert max(abs(count - 1000) for count in counts) < 4 * np.sqrt(3000 * 2 / 9)


def test_projector_of_the_paper():
    population = blobs()
    task = blueprint(FedDebias(), population).context(population, "cpu").task
    layers = [layer for layer in task.modules["projector"].module if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in layers] == [256, 256, 128]
    # the count with d = 128 features
    assert sum(p.numel() for p in mlp([128, *FedDebias().widths]).parameters()) == 131_712


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
        check_trial(blueprint(mixing(proxy="photographs"), blobs()), blobs())
    images = Examples(np.zeros((10, 1, 4, 4), np.uint8), np.zeros(10, np.int64))
    pictures = Population("pictures", (Client(0, "d", images, images, images),), 2, (1, 4, 4))
    with pytest.raises(UsageError, match=r"^data.name=mnits: .*mnist"):
        check_trial(blueprint(mixing(proxy="mnits"), pictures), pictures)
    words = Examples(np.zeros((10, 5), np.int64), np.zeros(10, np.int64))
    texts = Population("texts", (Client(0, "d", words, words, words),), 2, (5,))
    for algorithm in (FedDebias(), Mixup()):
        with pytest.raises(UsageError, match=rf"^algorithm.name={algorithm.name}: needs continuous inputs"):
            check_trial(blueprint(algorithm, texts), texts)
