"""APFL: two models and their mixture, by PFLlib's rule and by the paper's."""

import copy

import pytest
import torch

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, cross_entropy, data, mean, population, run, shares
from rayfed.algorithms.apfl import APFL


def gradient(model, x, y):
    grads = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
    return list(grads)


def mixture(v, w, alpha):
    model = copy.deepcopy(v)
    with torch.no_grad():
        for p, q in zip(model.parameters(), w.parameters(), strict=True):
            p.mul_(alpha).add_((1 - alpha) * q)
    return model


def move(model, grads):
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            p -= LR * g


def inner(v, w, grads):
    triples = zip(v.parameters(), w.parameters(), grads, strict=True)
    return sum(((p - q) * g).sum() for p, q, g in triples).detach()


def one_round(v, w, alpha, x, y, steps, variant, updates="step"):
    v, w = copy.deepcopy(v), copy.deepcopy(w)
    for step in range(steps):
        before = alpha
        common = gradient(w, x, y)
        if variant == "code":
            own = gradient(v, x, y)
            move(w, common)
            move(v, own)
            both = [alpha * a + (1 - alpha) * b for a, b in zip(own, common, strict=True)]
            alpha = (alpha - LR * (inner(v, w, both) + 0.02 * alpha)).clamp(0, 1)
        else:
            own = gradient(mixture(v, w, alpha), x, y)
            slope = inner(v, w, own)
            move(w, common)
            move(v, [alpha * g for g in own])
            alpha = (alpha - LR * slope).clamp(0, 1)
        if updates == "round" and step:
            alpha = before
    return (mixture(v, w, alpha) if variant == "code" else v), w, alpha


@pytest.mark.parametrize("updates", ["round", "step"])
@pytest.mark.parametrize("variant", ["code", "paper"])
def test_three_rounds_by_hand(variant, updates):
    people, model = population(), net(batch_norm=False)
    server = run(APFL(alpha=0.7, variant=variant, alpha_updates=updates), people, model, steps=3, rounds=3)
    w, own, alphas = model, [model] * 3, [torch.tensor(0.7)] * 3
    for _ in range(3):
        done = [one_round(own[i], w, alphas[i], *data(people, i), 3, variant, updates) for i in CLIENTS]
        own, alphas = [v for v, _, _ in done], [alpha for _, _, alpha in done]
        w = mean([w_i for _, w_i, _ in done], shares(people))
    assert_weights(server.state["weights"], w)
    for i, state in server.fleet.states.items():
        assert_weights(state["model"], own[i])
        torch.testing.assert_close(state["alpha"], alphas[i])
    assert len({round(alpha.item(), 4) for alpha in alphas}) == 3
    assert all(abs(alpha - 0.7) > 1e-4 for alpha in alphas)


def test_the_paper_keeps_the_statistics_of_the_mixture_and_mixes_parameters_only():
    """Three batches pass through v̄ = αv + (1−α)w, from statistics 0 and 1 with momentum 0.1; w has its own."""
    people, model, alpha = population(), net(), 0.3
    algorithm = APFL(alpha=alpha, adapt_alpha=False, variant="paper")
    server = run(algorithm, people, model, steps=3, rounds=1)
    x, y = data(people, 0)
    v, w = copy.deepcopy(model), copy.deepcopy(model).train()
    for _ in range(3):
        mixed = mixture(v, w, alpha).train()  # with the buffers of v
        own = gradient(mixed, x, y)
        v.load_state_dict(v.state_dict() | dict(mixed.named_buffers()))
        common = gradient(w, x, y)
        move(w, common)
        move(v, [alpha * g for g in own])
    state = server.fleet.states[0]
    assert_weights(state["model"], v)
    down = algorithm.broadcast(server.ctx, server.state)
    scored = algorithm.downloaded_model(server.ctx.at(client=0), state, down)
    for name, value in v.named_buffers():
        assert torch.equal(scored[name], state["model"][name])
        assert not value.is_floating_point() or not torch.equal(value, dict(w.named_buffers())[name])
    common = {name: server.state["weights"][name] for name, _ in v.named_parameters()}
    for name, value in common.items():
        torch.testing.assert_close(scored[name], alpha * state["model"][name] + (1 - alpha) * value)
