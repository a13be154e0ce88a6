"""What rayfed is held against: FedAvg as a bare loop of plain PyTorch, in two processes of one thread each.

Nothing is spared that a person would write by hand for speed: data as normalised floats in memory, `nn.Module` and
`torch.optim.SGD`, the model copied in for each client, and each process sums up its own clients' models. It measures no
loss, counts no bytes and checks nothing. It only takes the batches that rayfed takes, so that both end with the same
weights up to rounding, which proves that they did the same work.
"""

import contextlib
import copy
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.core.optim import SGD
from rayfed.core.rng import generator
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint, deal
from rayfed.engine.device_data import batch_rows

State = dict[str, np.ndarray]


class BareClient(NamedTuple):
    """A client's number, its share of all examples, and its training data, normalised."""

    number: int
    weight: float
    x: Tensor
    y: Tensor


class BareLoop:
    """FedAvg on the clients of `population` with the local training of `plan`; a context manager.

    Args:
        plan: gives the model and its initial weights, plain SGD's lr, the batch size, and the seed of the batches.
        channels_last: keep images and convolutions in that order, or in PyTorch's usual NCHW.
    """

    def __init__(self, plan: Blueprint, population: Population, *, processes: int = 2, channels_last: bool):
        if plan.optimizer != SGD(lr=plan.optimizer.lr) or plan.local.epochs != 1 or not plan.drop_last:
            raise ValueError("the bare loop knows one epoch of plain SGD on full batches only")
        self.state = _state(plan.model)
        self.rounds = 0
        self.steps = sum(len(client.train) // plan.batch_size for client in population.clients)
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for home in deal([len(client.train) for client in population.clients], processes):
            ours, theirs = spawn.Pipe()
            settings = (plan.optimizer.lr, plan.batch_size, plan.seed)
            arguments = (theirs, copy.deepcopy(plan.model), population, home, channels_last, settings)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def round(self) -> float:
        """Every client trains once, and the state becomes the weighted mean; returns the seconds that this took."""
        began = time.perf_counter()
        self.rounds += 1
        for pipe in self._pipes:
            pipe.send((self.rounds, self.state))
        sums = [pipe.recv() for pipe in self._pipes]
        self.state = {name: np.asarray(sum(part[name] for part in sums)) for name in self.state}
        return time.perf_counter() - began

    def __enter__(self) -> "BareLoop":
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):  # it died; its traceback was printed
                pipe.send(None)
            process.join()


def _serve(
    pipe: Connection,
    model: nn.Module,
    population: Population,
    home: Sequence[int],
    channels_last: bool,
    settings: tuple[float, int, int],
) -> None:
    torch.set_num_threads(1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=layout).train()  # type: ignore[call-overload]
    total = sum(len(client.train) for client in population.clients)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (population.mean, population.std))
    clients = []
    for number in home:
        examples = population.clients[number].train
        x, y = torch.from_numpy(np.asarray(examples.x)), torch.from_numpy(examples.y)
        if x.dtype == torch.uint8:
            x = ((x.float() / 255 - mean) / std).to(memory_format=layout)
        clients.append(BareClient(number, len(examples) / total, x, y))
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        round, state = order
        pipe.send(_train(model, clients, round, state, *settings))


def _train(
    model: nn.Module,
    clients: Sequence[BareClient],
    round: int,
    state: State,
    lr: float,
    batch_size: int,
    seed: int,
) -> State:
    """The sum over `clients` of weight · model after one epoch from `state`."""
    start = {name: torch.from_numpy(value) for name, value in state.items()}
    sums = {name: torch.zeros_like(value) for name, value in start.items()}
    for client in clients:
        rng = generator(seed, "batches", "round", round, 0, 0, client.number)
        rows = batch_rows(len(client.y), batch_size, epochs=1, steps=None, drop_last=True, rng=rng)
        epoch(model, start, client.x, client.y, torch.from_numpy(np.array(rows)), lr)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                sums[name].add_(value, alpha=client.weight)
    return {name: value.numpy() for name, value in sums.items()}


def epoch(model: nn.Module, start: dict[str, Tensor], x: Tensor, y: Tensor, rows: Tensor, lr: float) -> None:
    """The loop itself: `model` takes the weights `start`, and then a step of SGD for each row of `rows`."""
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for some in rows:
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()


def _state(model: nn.Module) -> State:
    return {name: value.detach().clone().numpy() for name, value in model.state_dict().items()}


def largest_difference(weights: dict[str, Any], state: State) -> float:
    """The largest difference between rayfed's weights and the bare loop's, over everything but counters."""
    names = [name for name in state if weights[name].is_floating_point()]
    return max(float((weights[name] - torch.from_numpy(state[name])).abs().max()) for name in names)
