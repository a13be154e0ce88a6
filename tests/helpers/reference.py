"""Federated learning by hand, with torch.optim on copied modules and nothing of rayfed: what methods are held against.

Every client takes its whole training part as one batch, so that the order of examples does not matter.
"""

import copy

import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, simulate
from rayfed.algorithm import Phase
from rayfed.core.optim import SGD
from rayfed.core.task import Batch

SIZES = (8, 12, 20)
LR = 0.1
CLIENTS = range(len(SIZES))


def population(sizes=SIZES, seed=0):
    return blobs(len(sizes), sizes=sizes, seed=seed)


def plan(algorithm, people, model, *, steps=2, rounds=2, **changes):
    """A blueprint with whole-data batches."""
    values = {"optimizer": SGD(lr=LR), "batch_size": 100, "drop_last": False, "local": Phase("train", steps=steps)}
    return blueprint(algorithm, people, model=model, rounds=rounds, **(values | changes))


def run(algorithm, people, model, **changes):
    """The server after its last round."""
    return simulate(plan(algorithm, people, model, **changes), people, points=("trained",))[0]


def data(people, client):
    train = people.clients[client].train
    return torch.from_numpy(train.x), torch.from_numpy(train.y)


def batch(n=5, seed=0):
    """A batch of noise like the examples of `population`."""
    draw = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw))


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def proximal(anchor, mu, without=()):
    """The loss f(w) + μ/2 ‖w − anchor‖² over all parameters but those called `without`."""
    fixed = {name: p.detach().clone() for name, p in anchor.named_parameters() if name not in without}

    def loss(model, x, y):
        distance = sum((p - fixed[name]).square().sum() for name, p in model.named_parameters() if name in fixed)
        return cross_entropy(model, x, y) + mu / 2 * distance

    return loss


def descend(model, x, y, steps, *, loss=cross_entropy, optimizer=None, names=None):
    """A trained copy of `model`; `loss(model, x, y)`, `optimizer(parameters)`, `names`: the parameters to train."""
    model = copy.deepcopy(model).train()
    chosen = [p for name, p in model.named_parameters() if names is None or name in names]
    sgd = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=LR)))(chosen)
    for _ in range(steps):
        model.zero_grad()
        loss(model, x, y).backward()
        sgd.step()
    return model


def mean(models, shares):
    """A model whose parameters and floating-point buffers are the mean with `shares`; counters are the greatest."""
    states = [model.state_dict() for model in models]
    result = copy.deepcopy(models[0])
    result.load_state_dict(
        {
            name: sum(p * state[name] for p, state in zip(shares, states, strict=True))
            if states[0][name].is_floating_point()
            else max(state[name] for state in states)
            for name in states[0]
        }
    )
    return result


def shares(people):
    sizes = [len(client.train) for client in people.clients]
    return [size / sum(sizes) for size in sizes]


def assert_weights(weights, model, *, atol=1e-6):
    """`weights` are those of `model`, as far as they go."""
    state = model.state_dict()
    assert weights
    for name, value in weights.items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
