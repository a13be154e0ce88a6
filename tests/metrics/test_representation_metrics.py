"""Metrics of representations, against closed forms."""

import math

import numpy as np
import pytest
import torch

from rayfed.metrics.base import Representations
from rayfed.metrics.representations import Frechet, HeadAccuracy, Mdl, Tsne, frechet_distance


def group(client, z, y=None, domain=None, split="test"):
    z = torch.as_tensor(z, dtype=torch.float32)
    y = torch.zeros(len(z), dtype=torch.int64) if y is None else torch.as_tensor(y)
    return Representations(client, domain or f"d{client}", z, y, split)


def test_frechet_in_one_dimension():
    """N(m₁, s₁²) against N(m₂, s₂²): (m₁ − m₂)² + (s₁ − s₂)²."""
    a, b = np.array([[0.0], [2.0]]), np.array([[3.0], [9.0]])  # means 1, 6; deviations (n − 1) √2, √18
    assert frechet_distance(a, b) == pytest.approx(25 + (math.sqrt(18) - math.sqrt(2)) ** 2)


def test_frechet_of_clients_against_all():
    groups = [group(0, [[0.0], [2.0]], domain="a"), group(1, [[4.0], [6.0]], domain="a"), group(2, [[9.0]])]
    found = {(client, domain, v.metric): v for client, domain, v in Frechet().measure(groups, 2, 0)}
    whole = np.array([[0.0], [2], [4], [6], [9]])
    expected = [frechet_distance(whole[:2], whole), frechet_distance(whole[2:4], whole)]
    assert set(found) == {(0, "a", "frechet"), (1, "a", "frechet"), (-1, "", "frechet_mean")}  # one vector spreads not
    assert [found[i, "a", "frechet"].value for i in (0, 1)] == pytest.approx(expected)
    assert found[0, "a", "frechet"].n == 2
    assert found[-1, "", "frechet_mean"].value == pytest.approx(sum(expected) / 2)


def test_head_accuracy_is_of_each_clients_own_head():
    """Two clients with opposite labels: a common head would be wrong for one of them."""
    z = [[-2.0], [-1.0], [1.0], [2.0]]
    groups = [
        group(0, z, [0, 0, 1, 1], split="train"),
        group(0, [[-1.5], [1.5], [3.0], [-3.0]], [0, 1, 1, 1]),  # the last one is not what the head says
        group(1, z, [1, 1, 0, 0], split="train"),
        group(1, [[-1.5], [1.5]], [1, 0]),
        group(2, z, [0, 0, 0, 0], split="train"),  # one class alone
        group(2, [[5.0], [6.0]], [0, 1]),
        group(3, z, [0, 1, 0, 1]),  # nothing to learn from
    ]
    found = {client: (v.value, v.n) for client, _, v in HeadAccuracy().measure(groups, 2, 0)}
    assert found == {0: (0.75, 4), 1: (1.0, 2), 2: (0.5, 2)}


def test_head_accuracy_learns_from_all_its_parts():
    """The class boundary lies at 0 by the training part, and at 10 by both."""
    train = group(0, [[-1.0], [1.0]] * 5, [0, 1] * 5, split="train")
    val = group(0, [[float(i)] for i in range(2, 19)], [0] * 8 + [1] * 9, split="val")
    wide = group(0, [[-1.0], [1.0]] * 5, [0, 0] * 5, split="train")
    test = group(0, [[4.0], [16.0]], [0, 1])
    ((_, _, of_train),) = HeadAccuracy().measure([train, val, test], 2, 0)
    ((_, _, of_both),) = HeadAccuracy(fit=["train", "val"]).measure([wide, val, test], 2, 0)
    assert (of_train.value, of_both.value) == (0.5, 1.0)
    assert HeadAccuracy(fit=["train", "val"]).splits == {"train", "val", "test"}


def test_mdl_adds_up_losses_on_what_the_probe_has_not_seen(monkeypatch):
    """With L = 2 everywhere the code has the length of a sum over the examples, and the first ones cost log C."""

    def loss(self, z, y, size, test, classes, seed):
        seen.append((size, *test.indices(len(y))[:2]))
        return 2.0

    seen = []
    monkeypatch.setattr(Mdl, "_loss", loss)
    z, y = torch.randn(1000, 3), torch.zeros(1000, dtype=torch.int64)
    assert Mdl(sizes=3).length(z, y, 4, 0) == pytest.approx(2.0 * 900)
    assert Mdl(sizes=3, coding="online").length(z, y, 4, 0) == pytest.approx(10 * math.log(4) + 2.0 * 990)
    assert seen == [(10, 900, 1000), (95, 900, 1000), (900, 900, 1000), (10, 10, 100), (100, 100, 1000)]


def test_mdl_of_separable_and_of_random_labels():
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(2, (600,), generator=draw)
    clear = torch.randn(600, 4, generator=draw) * 0.1 + 3.0 * y[:, None]
    noise = torch.randn(600, 4, generator=draw)
    small = Mdl(sizes=4, seeds=2, hidden=16, steps=60, lr=1e-2)
    length = {}
    for name, z in (("clear", clear), ("noise", noise)):
        ((_, _, found),) = small.measure([group(0, z, y)], 2, 0)
        length[name] = found.value
        assert found.n == 600
    assert length["clear"] < 60
    assert length["noise"] > 0.9 * 540 * math.log(2)
    ((_, _, bits),) = Mdl(sizes=4, seeds=2, hidden=16, steps=60, lr=1e-2, unit="bits").measure(
        [group(0, clear, y)], 2, 0
    )
    assert bits.value == pytest.approx(length["clear"] / math.log(2))


def test_tsne_keeps_clusters_apart():
    draw = torch.Generator().manual_seed(0)
    groups = [group(i, torch.randn(25, 5, generator=draw) * 0.01 + 5 * i, torch.full((25,), i)) for i in range(2)]
    places = Tsne(perplexity=5).map(groups, 0)
    assert [(p.client, p.domain, p.label) for p in (places[0], places[-1])] == [(0, "d0", 0), (1, "d1", 1)]
    at = np.array([(p.x, p.y) for p in places])
    centres = at[:25].mean(0), at[25:].mean(0)
    for half, own, other in ((at[:25], *centres), (at[25:], *centres[::-1])):
        assert (np.linalg.norm(half - own, axis=1) < np.linalg.norm(half - other, axis=1)).all()


@pytest.mark.parametrize("z", [torch.zeros(60, 4), torch.full((60, 3), 0.1), 1e-30 * torch.arange(60.0)[:, None]])
def test_tsne_of_what_is_all_the_same(z):
    """As a network whose last ReLU never opens; scikit-learn ends the process by a segmentation fault."""
    assert {(p.x, p.y) for p in Tsne().map([group(0, z, torch.zeros(60))], 0)} == {(0.0, 0.0)}
