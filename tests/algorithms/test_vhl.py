"""VHL: the contrastive loss as it is written, a round by hand, and the virtual data."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import LR, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms.vhl import VHL, contrast, virtual_data
from rayfed.core.ids import Moment
from rayfed.core.rng import seed_torch


def literal(z, y, temperature):
    terms = []
    for a in range(len(z)):
        friends = [b for b in range(len(z)) if b != a and y[b] == y[a]]
        if not friends:
            terms.append(0 * z[a].sum())
            continue
        total = sum(torch.exp(z[a] @ z[c] / temperature) for c in range(len(z)) if c != a)
        terms.append(-sum(torch.log(torch.exp(z[a] @ z[b] / temperature) / total) for b in friends) / len(friends))
    return torch.stack(terms).mean()


def test_contrast_is_its_literal_form():
    torch.manual_seed(0)
    z, y = F.normalize(torch.randn(7, 4)), torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are alone
    z = z.requires_grad_()
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
        seed_torch(0, "start", Moment("round", 1), client=i)
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
