"""Two clients that minimise (w - 1)² from w = 0, so that every weight of every round is known.

With one step per round, a learning rate r leaves the error (1 - 2 r) after each. The best rate is 0.5.
"""

import numpy as np
import torch

ROUNDS = 6
QUICK = {
    "rounds": ROUNDS,
    "local.steps": 1,
    "local.batch_size": 4,
    "select.metric": "loss",
    "evaluate.splits": ["val"],
}


def half():
    return np.ones((4, 1), np.float32), np.ones(4, np.float32)


def network():
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    return module


def squared(outputs, y):
    return ((outputs[:, 0] - y) ** 2).mean()


GIVEN = {
    "clients": [{"train": half(), "val": half(), "test": half()} for _ in range(2)],
    "model": network,
    "loss": squared,
}
