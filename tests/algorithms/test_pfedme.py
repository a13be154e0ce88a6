"""pFedMe: Moreau envelopes, a personal model near the local one."""

import copy

import pytest
import torch

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, cross_entropy, data, mean, population, run, shares
from rayfed.algorithms.pfedme import PFedMe

OPTIONS = {"lam": 3.0, "inner_steps": 2, "personal_lr": 0.05, "decay": 0.01}


def one_round(received, x, y, steps):
    v, w = copy.deepcopy(received).train(), copy.deepcopy(received)
    for _ in range(steps):
        for _ in range(2):
            grads = torch.autograd.grad(cross_entropy(v, x, y), list(v.parameters()))
            with torch.no_grad():
                for p, q, g in zip(v.parameters(), w.parameters(), grads, strict=True):
                    p -= 0.05 * (g + 3.0 * (p - q) + 0.01 * p)
        with torch.no_grad():
            for p, q in zip(v.parameters(), w.parameters(), strict=True):
                q -= LR * 3.0 * (q - p)
    for b, c in zip(v.buffers(), w.buffers(), strict=True):
        c.copy_(b)
    return v, w


@pytest.mark.parametrize("beta", [1.0, 1.7])
def test_two_rounds_by_hand(beta):
    people, model = population(), net()
    server = run(PFedMe(beta=beta, **OPTIONS), people, model, steps=3)
    for _ in range(2):
        pairs = [one_round(model, *data(people, i), 3) for i in CLIENTS]
        before, model = model, mean([w for _, w in pairs], shares(people))
        with torch.no_grad():
            for p, q in zip(model.parameters(), before.parameters(), strict=True):
                p.mul_(beta).add_((1 - beta) * q)
    assert_weights(server.state["weights"], model, atol=5e-6)
    for i, state in server.fleet.states.items():
        assert_weights(state["model"], pairs[i][0], atol=5e-6)


def test_personal_batch_norm_is_neither_pulled_nor_sent():
    people = population()
    server = run(PFedMe(), people, net(), batch_norm="local")
    names = server.ctx.task.batch_norm_names
    state = server.fleet.states[0]
    assert not names & set(server.state["weights"])
    assert set(state["weights"]) == names
    assert all(torch.equal(state["weights"][name], state["model"][name]) for name in names)
