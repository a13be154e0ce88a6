"""APPLE: a step is gradient descent on own core and relations at once; what is sent and scored."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import CLIENTS, LR, data, population, run
from rayfed.algorithms.apple import APPLE

SHARES = torch.tensor([8.0, 12.0, 20.0]) / 40


def by_hand(cores, p, client, x, y, steps, *, relation_lr, pull):
    """Autograd on ℓ(Σ_j p_j w_j) + pull ‖p − shares‖², whose leaves are w_i and p."""
    own, p = {k: v.clone() for k, v in cores[client].items()}, p.clone()
    for _ in range(steps):
        own = {k: v.detach().requires_grad_() for k, v in own.items()}
        p = p.detach().requires_grad_()
        all_cores = [own if j == client else cores[j] for j in CLIENTS]
        mixed = {k: sum(p[j] * all_cores[j][k] for j in CLIENTS) for k in own}
        loss = F.cross_entropy(torch.func.functional_call(net(batch_norm=False), mixed, (x,)), y)
        loss = loss + pull * (p - SHARES).square().sum()
        *grads, slope = torch.autograd.grad(loss, [*own.values(), p])
        own = {k: v - LR * g for (k, v), g in zip(own.items(), grads, strict=True)}
        p = p - relation_lr * slope
    return {k: v.detach() for k, v in own.items()}, p.detach()


@pytest.mark.parametrize(
    ("width", "initial", "schedule"),
    [(1, "shares", "exponential"), (1, "uniform", "cosine"), (3, "shares", "exponential")],
)
def test_three_rounds_by_hand(width, initial, schedule):
    sizes = (8, 12, 20)
    people = population(sizes)
    algorithm = APPLE(relation_lr=0.05, mu=0.4, pull_rounds=0.5, initial=initial, pull_schedule=schedule)
    changes = {"steps": 2, "rounds": 3}
    if width == 3:  # batches of one size
        changes |= {"batch_size": 8, "drop_last": True}
    server = run(algorithm, people, net(batch_norm=False), vmap_clients=width, **changes)
    assert server.state["shares"].tolist() == pytest.approx(SHARES.tolist())
    if width == 3:
        alone = run(algorithm, people, net(batch_norm=False), **changes)
        for name, value in alone.state["cores"].items():
            torch.testing.assert_close(server.state["cores"][name], value, rtol=1e-4, atol=1e-6)
        return
    cores = [{k: v.detach() for k, v in net(batch_norm=False).named_parameters()} for _ in CLIENTS]
    first = torch.full((3,), 1 / 3) if initial == "uniform" else SHARES
    ps = [first for _ in CLIENTS]
    fading = {"cosine": lambda t: (1 + math.cos(math.pi * t)) / 2, "exponential": lambda t: 0.001**t}[schedule]
    for r in range(3):
        pull = 0.4 * (fading(r / 1.5) if r < 1.5 else 0.0)
        done = [by_hand(cores, ps[i], i, *data(people, i), 2, relation_lr=0.05, pull=pull) for i in CLIENTS]
        cores, ps = [core for core, _ in done], [p for _, p in done]
    for i in CLIENTS:
        torch.testing.assert_close(server.fleet.states[i]["p"], ps[i])
        assert (ps[i] - first).abs().max() > 1e-3
        for name, value in cores[i].items():
            torch.testing.assert_close(server.state["cores"][name][i], value)
