"""MOON against autograd on copied modules."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from plain import CLIENTS, assert_weights, cross_entropy, data, descend, mean, population, run, shares
from support import net

from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.moon import Moon, contrast


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


@pytest.mark.parametrize(("batch_norm", "tau"), [(True, 0.5), (False, 0.1)])
def test_three_rounds_by_hand(batch_norm, tau):
    people, model = population(), net(batch_norm)
    server = run(Moon(mu=2.0, tau=tau), people, model, steps=3, rounds=3)
    previous = None
    for _ in range(3):
        trained = []
        for i in CLIENTS:
            last = previous[i] if previous else model
            trained.append(descend(model, *data(people, i), 3, loss=contrastive(model, last, 2.0, tau)))
        previous, model = trained, mean(trained, shares(people))
    assert_weights(server.state["weights"], model)
    for i, state in server.fleet.save().items():
        assert_weights(state["previous"], previous[i])


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


def test_the_first_visit_is_fedavg_and_the_second_is_not():
    people = population()
    for rounds, same in ((1, True), (2, False)):
        ours = run(Moon(mu=5.0), people, net(), rounds=rounds).state["weights"]["fc.weight"]
        fedavg = run(FedAvg(), people, net(), rounds=rounds).state["weights"]["fc.weight"]
        assert torch.allclose(ours, fedavg, atol=1e-7) is same


def test_mu_zero_is_fedavg_bit_for_bit():
    people = population()
    ours = run(Moon(mu=0.0), people, net(), rounds=3).state["weights"]
    fedavg = run(FedAvg(), people, net(), rounds=3).state["weights"]
    assert all(torch.equal(ours[name], fedavg[name]) for name in fedavg)


def test_the_previous_model_is_that_of_the_last_visit():
    people, model = population(), net()
    server = run(Moon(), people, model, rounds=1, cohort=1)
    (visited,) = server.sample(1)
    states = server.fleet.save()
    trained = descend(model, *data(people, visited), 2, loss=cross_entropy)
    assert_weights(states[visited]["previous"], trained)
    assert all("previous" not in state for i, state in states.items() if i != visited)


def test_with_local_batch_norm_the_received_model_has_the_clients_layers():
    people, model = population(), net()
    server = run(Moon(mu=2.0), people, model, steps=3, rounds=2, batch_norm="local")
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
