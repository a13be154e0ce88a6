"""MOON against autograd on copied modules."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.federations import net
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms.common.networks import with_projection
from rayfed.algorithms.moon import Moon, contrast
from rayfed.core.errors import UsageError
from rayfed.core.outputs import Outputs
from rayfed.core.task import Task
from rayfed.models.split_model import ensure_split


def contrastive(received, previous, mu, tau):
    received, previous = copy.deepcopy(received).eval(), copy.deepcopy(previous).eval()

    def loss(model, x, y):
        z = model.features(x)
        with torch.no_grad():
            z_glob, z_prev = received.features(x), previous.features(x)
        near, far = F.cosine_similarity(z, z_glob), F.cosine_similarity(z, z_prev)
        ratio = torch.exp(near / tau) / (torch.exp(near / tau) + torch.exp(far / tau))
        return F.cross_entropy(model.head(z), y) - mu * torch.log(ratio).mean()

    return loss


class Headed(nn.Module):
    """`net` with MOON's projection head: z behind an MLP of two layers, a new classifier on top."""

    def __init__(self, batch_norm, hidden, outputs):
        super().__init__()
        self.model = net(batch_norm)
        del self.model.fc
        self.projection = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
        self.head = nn.Linear(outputs, 3)

    def features(self, x):
        return self.projection(self.model.features(x))

    def forward(self, x):
        return self.head(self.features(x))


def headed(server, batch_norm=True):
    """The model of the simulation of `server` before its first round, with a head of widths 7 and 5."""
    model = Headed(batch_norm, 7, 5)
    model.load_state_dict(server.ctx.task.initial_weights())
    return model


@pytest.mark.parametrize(("batch_norm", "tau"), [(True, 0.5), (False, 0.1)])
@pytest.mark.parametrize("widths", [[], [7, 5]])
def test_three_rounds_by_hand(widths, batch_norm, tau):
    people = population()
    server = run(Moon(mu=2.0, tau=tau, widths=widths), people, net(batch_norm), steps=3, rounds=3)
    first = model = headed(server, batch_norm) if widths else net(batch_norm)
    previous = [model] * len(CLIENTS)
    for _ in range(3):
        trained = []
        for i in CLIENTS:
            trained.append(descend(model, *data(people, i), 3, loss=contrastive(model, previous[i], 2.0, tau)))
        previous, model = trained, mean(trained, shares(people))
    assert_weights(server.state["weights"], model)
    for i, state in server.fleet.states.items():
        assert_weights(state["previous"], previous[i])
    assert set(server.state["weights"]) == set(first.state_dict())
    new = [name for name in server.state["weights"] if name.startswith(("projection.", "head."))]
    assert not any(torch.equal(server.state["weights"][name], first.state_dict()[name]) for name in new)


class Deep(nn.Module):
    """Its method `head` has two layers; for inputs of several dimensions, the last one is that of the layers."""

    def __init__(self):
        super().__init__()
        self.body, self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 4)

    def features(self, x):
        return torch.relu(self.body(x))

    def head(self, z):
        return self.out(torch.relu(self.hidden(z)))

    def forward(self, x):
        return self.head(self.features(x))


def test_the_head_has_the_outputs_of_the_model_or_is_refused():
    """Also outputs that are numbers, of which the labels tell no number of classes."""
    task = Task(ensure_split(Deep(), (6,)), F.mse_loss, num_clients=1, num_classes=1, outputs=Outputs("numbers"))
    made = with_projection(task, [5])
    assert made.predict(made.initial_weights(), torch.zeros(3, 6)).shape == (3, 4)
    task = Task(ensure_split(Deep(), (2, 6)), F.cross_entropy, num_clients=1, num_classes=4)
    with pytest.raises(UsageError, match=r"^algorithm.widths: .* are \[2, 4\] for an example; widths=\[\] is"):
        with_projection(task, [5])


def test_the_term_in_numbers():
    right, up = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert contrast(right, right, up, 0.5).item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert contrast(right, up, right, 0.5).item() == pytest.approx(math.log(1 + math.exp(2)))
    assert contrast(right, up, up, 0.5).item() == pytest.approx(math.log(2))
    both = contrast(torch.cat([right, right]), torch.cat([right, up]), torch.cat([up, right]), 0.5).item()
    assert both == pytest.approx((math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2)
    # feature maps count as long vectors
    maps = [t.view(1, 2, 1, 1) for t in (right, right, up)]
    assert contrast(*maps, 0.5).item() == pytest.approx(math.log(1 + math.exp(-2)))


def test_with_local_batch_norm_the_received_model_has_the_clients_layers():
    people, model = population(), net()
    server = run(Moon(mu=2.0, widths=[]), people, model, steps=3, rounds=2, batch_norm="local")
    own = server.ctx.task.batch_norm_names
    first = [descend(model, *data(people, i), 3) for i in CLIENTS]
    common = mean(first, shares(people)).state_dict()
    second = []
    for i, last in enumerate(first):
        received = copy.deepcopy(last)
        received.load_state_dict(common | {name: value for name, value in last.state_dict().items() if name in own})
        second.append(descend(received, *data(people, i), 3, loss=contrastive(received, last, 2.0, 0.5)))
    assert_weights(server.state["weights"], mean(second, shares(people)))
    assert not own & set(server.state["weights"])
