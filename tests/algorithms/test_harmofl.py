"""HarmoFL: amplitude and phase, the setup's mean, the step at a perturbed point, refusals."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net, on_pictures, reshaped
from helpers.reference import CLIENTS, LR, assert_weights, data, population, run
from rayfed.algorithms.harmofl import AMPLITUDE, HarmoFL, mean_amplitude, normalise_amplitude

SHAPE = (1, 2, 3)


def pictures():
    return reshaped(population(), SHAPE)


def test_amplitudes_are_swapped_and_phases_stay():
    torch.manual_seed(0)
    x, other = torch.randn(4, 3, 8, 8), torch.randn(5, 3, 8, 8)
    common = mean_amplitude(other)
    spectrum = torch.fft.fft2(normalise_amplitude(x, common))
    torch.testing.assert_close(spectrum.abs(), common.expand_as(x), rtol=1e-3, atol=1e-3)
    before = torch.fft.fft2(x)
    turned = (spectrum / spectrum.abs()) * (before / before.abs()).conj()
    torch.testing.assert_close(turned.real, torch.ones_like(turned.real), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(normalise_amplitude(x[:1], mean_amplitude(x[:1])), x[:1], rtol=1e-4, atol=1e-5)
    assert normalise_amplitude(x, torch.zeros(0)) is x


def test_the_setup_takes_the_mean_of_the_clients_running_means():
    people = pictures()
    server = run(HarmoFL(amplitude_momentum=0.3), people, on_pictures(net()), batch_size=5, drop_last=False)
    running = []
    for i in CLIENTS:
        x = people.clients[i].train.x
        first, *rest = [np.abs(np.fft.fft2(x[k : k + 5])).mean(0) for k in range(0, len(x), 5)]
        for part in rest:
            first = 0.7 * first + 0.3 * part
        running.append(first)
    torch.testing.assert_close(server.state["amplitude"].double(), torch.from_numpy(sum(running) / 3).double())
    for state in server.fleet.states.values():
        assert torch.equal(state["weights"][AMPLITUDE], server.state["amplitude"])
    assert torch.equal(server.algorithm.global_model(server.ctx, server.state)[AMPLITUDE], server.state["amplitude"])


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_two_rounds_by_hand(alpha):
    people, model = pictures(), on_pictures(net(batch_norm=False))
    server = run(HarmoFL(alpha=alpha), people, model)
    common = server.state["amplitude"]
    for _ in range(2):
        trained = []
        for i in CLIENTS:
            x, y = data(people, i)
            x, own = normalise_amplitude(x, common), copy.deepcopy(model)
            for _ in range(2):
                start = [p.detach().clone() for p in own.parameters()]
                grads = torch.autograd.grad(F.cross_entropy(own(x), y), list(own.parameters()))
                norm = torch.cat([g.flatten() for g in grads]).norm()
                with torch.no_grad():
                    for p, g in zip(own.parameters(), grads, strict=True):
                        p.add_(alpha * g / norm)
                grads = torch.autograd.grad(F.cross_entropy(own(x), y), list(own.parameters()))
                with torch.no_grad():
                    for p, old, g in zip(own.parameters(), start, grads, strict=True):
                        p.copy_(old - LR * g)
            trained.append(own)
        model = copy.deepcopy(model)
        model.load_state_dict({k: sum(own.state_dict()[k] for own in trained) / 3 for k in model.state_dict()})
    assert_weights(server.state["weights"], model, atol=1e-5)
