"""Blocks of clients that train at once: what a step costs does not depend on how many they are."""

from collections import Counter, defaultdict
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.algorithm_cases import MAIN_CASES, finished, plan_of
from helpers.federations import blueprint
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import vectorised
from rayfed.core.optim import SGD, Adam
from rayfed.data.clients import Client, Examples
from rayfed.data.population import Population
from rayfed.engine import training
from rayfed.engine.device_data import Normalise, Part
from rayfed.engine.training import Pool, train_block
from rayfed.models.build import build_model

BATCH, SHAPE = 2, (1, 16, 16)
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "lift_fresh"}
"""Operations that wait for a GPU; the last one is a value that is copied to it."""


LAYOUT = {"view", "_unsafe_view", "clone"}
"""What reshapes a tensor, which needs no copy where there is one client."""


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched to a device, but for those of `LAYOUT`."""

    def __init__(self):
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) not in LAYOUT:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step(plan, people, clients):
    """Return the operations of one more step of a block: its batch, the step itself, and the sums of metrics."""
    ctx = plan.context(people, "cpu")
    (exchange,) = plan.algorithm.exchanges("round")
    down = exchange.broadcast(ctx, plan.algorithm.init(ctx))
    normalise = Normalise(people, torch.device("cpu"), channels_last=ctx.task.channels_last)
    parts = [Part(people.clients[0].train, torch.device("cpu"), normalise)] * clients
    work = [exchange.start(ctx, plan.algorithm.join(ctx), down)] * clients
    counted = []
    for steps in (2, 3):
        batches = Pool(parts).batches([[np.arange(BATCH)] * steps] * clients, range(clients))
        with Operations() as operations:
            train_block(exchange, ctx, work, down, batches, [steps] * clients)
        counted.append(operations.counts)
    return counted[1] - counted[0]


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("network", "options"), [("mlp", {"hidden": [8]}), ("cnn", {}), ("digits_cnn", {"width": 0.02})]
)
def test_a_step_takes_as_many_operations_for_any_number_of_clients(network, options, optimizer):
    x, y = np.zeros((BATCH, *SHAPE), np.uint8), np.zeros(BATCH, np.int64)
    client = Client(0, "all", Examples(x, y), Examples(x[:0], y[:0]), Examples(x[:0], y[:0]))
    people = Population("zeros", (client,), 10, SHAPE, (0.5,), (0.5,))
    model = build_model(network, options, SHAPE, 10)
    plan = blueprint(FedAvg(), people, model=model, optimizer=optimizer, batch_size=BATCH)
    alone = operations_of_a_step(plan, people, 1)
    assert alone["index_select"] == 2  # the inputs and the labels of all clients
    assert not WAITING & {*alone}
    for clients in (16, 64, 256):
        assert operations_of_a_step(plan, people, clients) == alone


@MAIN_CASES
def test_no_step_of_any_method_waits_for_the_device(case, monkeypatch):
    seen, current = defaultdict(list), []

    def watched(exchange, ctx, *others):
        current[:] = [(type(exchange).__name__, ctx.moment.stage, ctx.phase)]
        return train_block(exchange, ctx, *others)

    @contextmanager
    def counted():
        with vectorised(), Operations() as operations:
            yield
        seen[current[0]].append(operations.counts)

    monkeypatch.setattr(training, "train_block", watched)
    monkeypatch.setattr(training, "vectorised", counted)
    finished(plan_of(case, vmap_clients=4, rounds=1))
    assert seen
    for name, steps in seen.items():
        assert not WAITING & {operation for counts in steps for operation in counts}, name
