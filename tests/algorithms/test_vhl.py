"""VHL: the contrastive loss as it is written, a round by hand, and the virtual data."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import LR, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms.mixup import MixedBatches, Mixup
from rayfed.algorithms.vhl import VHL, contrast, virtual_data
from rayfed.core.ids import Moment
from rayfed.core.rng import Streams


def literal(z, y, temperature):
    """For classes, or for class probabilities, with their overlap as the weight of a pair."""
    terms = []
    for a in range(len(z)):
        overlap = {b: float(y[a] == y[b]) if y.dim() == 1 else y[a] @ y[b] for b in range(len(z)) if b != a}
        if not sum(overlap.values()):
            terms.append(0 * z[a].sum())
            continue
        total = sum(torch.exp(z[a] @ z[c] / temperature) for c in range(len(z)) if c != a)
        logs = {b: torch.log(torch.exp(z[a] @ z[b] / temperature) / total) for b in overlap}
        terms.append(-sum(overlap[b] * logs[b] for b in overlap) / sum(overlap.values()))
    return torch.stack(terms).mean()


ALONE = F.one_hot(torch.tensor([0, 1, 0, 2, 1, 0, 3]), 4).float()  # 2 and 3 are alone
MIXED = 0.7 * ALONE + 0.3 * ALONE[[2, 0, 5, 3, 6, 1, 4]]


@pytest.mark.parametrize("y", [ALONE, MIXED], ids=["classes", "mixed"])
def test_contrast_is_its_literal_form(y):
    torch.manual_seed(0)
    z = F.normalize(torch.randn(7, 4)).requires_grad_()
    for temperature in (0.07, 1.0):
        found, wanted = contrast(z, y, temperature), literal(z, y, temperature)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
        slopes = [torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_two_steps_by_hand(width, batch_norm):
    people, model = population((10, 10, 10)), net(batch_norm)
    algorithm = VHL(virtual_examples=7, virtual_batch_size=5, alpha=0.6, align=0.3, temperature=0.5)
    changes = {"batch_size": 10, "drop_last": True, "vmap_clients": width}
    server = run(algorithm, people, model, rounds=1, **changes)
    virtual = server.state["virtual"]
    locals_ = []
    for i in range(3):
        Streams(0).begin("start", Moment("round", 1), client=i)
        order = torch.randperm(7)
        x, y = data(people, i)
        local = descend(model, x, y, 0)
        sgd = torch.optim.SGD(local.parameters(), lr=LR)
        for step in range(2):
            rows = order[(torch.arange(5) + 5 * step) % 7]
            v, y_v = virtual["x"][rows], virtual["y"][rows]
            own = local.features(x)
            statistics = {name: buffer.clone() for name, buffer in local.named_buffers()}
            other = local.features(v)
            loss = F.cross_entropy(local.head(own), y) + 0.6 * F.cross_entropy(local.head(other), y_v)
            own, other = F.normalize(own), F.normalize(other)
            both = literal(torch.cat([own, other.detach()]), torch.cat([y, y_v]), 0.5)
            loss = loss + 0.3 * (both + 0.1 * literal(other, y_v, 0.5))
            local.zero_grad()
            loss.backward()
            sgd.step()
            local.load_state_dict(local.state_dict() | statistics)  # v leaves running statistics alone
        locals_.append(local)
    assert_weights(server.state["weights"], mean(locals_, shares(people)), atol=1e-5)


def test_mixup_mixes_the_local_classes_alone(monkeypatch):
    """A step over a batch that was mixed, which is known: CE and alignment with its probabilities."""
    people, model = population((10,)), net(batch_norm=False)
    base = VHL(virtual_examples=5, virtual_batch_size=5, alpha=0.6, align=0.3, temperature=0.5)
    mixed = []

    def noting(self, ctx, batch):
        mixed.append(prepare(self, ctx, batch))
        return mixed[-1]

    prepare = MixedBatches.prepare
    monkeypatch.setattr(MixedBatches, "prepare", noting)
    changes = {"batch_size": 10, "drop_last": True, "steps": 1, "rounds": 1}
    server = run(Mixup(alpha=5.0, base=base), people, model, **changes)
    ((x, y),) = mixed
    assert ((y > 0.01).sum(1) > 1).any()
    virtual = server.state["virtual"]
    local = descend(model, x, y, 0)
    own, other = local.features(x), local.features(virtual["x"])
    loss = F.cross_entropy(local.head(own), y) + 0.6 * F.cross_entropy(local.head(other), virtual["y"])
    own, other = F.normalize(own), F.normalize(other)
    labels = F.one_hot(virtual["y"], 3).float()
    loss = loss + 0.3 * literal(torch.cat([own, other.detach()]), torch.cat([y, labels]), 0.5)
    sgd = torch.optim.SGD(local.parameters(), lr=LR)
    (loss + 0.03 * literal(other, labels, 0.5)).backward()
    sgd.step()
    assert_weights(server.state["weights"], local, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 15, 9), (6,), (2, 5)])
def test_virtual_data_is_standard_balanced_and_tells_its_classes(shape):
    torch.manual_seed(0)
    x, y = virtual_data(shape, 10, 205)
    assert x.shape == (205, *shape)
    assert (x.mean().abs().item(), x.std().item()) == pytest.approx((0, 1), abs=1e-4)
    assert y.bincount().tolist() == [21] * 5 + [20] * 5
    centres = torch.stack([x[:100][y[:100] == c].mean(0).flatten() for c in range(10)])
    nearest = torch.cdist(x[100:].flatten(1), centres).argmin(1)
    assert (nearest == y[100:]).float().mean() > 0.8
    torch.manual_seed(0)
    assert torch.equal(virtual_data(shape, 10, 205)[0], x)
