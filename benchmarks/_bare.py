"""The baseline of the speed benchmarks: FedAvg as a bare PyTorch loop in two processes with one thread each.

The loop is what one would write by hand for speed: data in memory as normalised floats, `nn.Module` and
`torch.optim.SGD`, the global model copied in for each client, and a sum of the clients' models in each process. It
measures no loss, counts no bytes and checks nothing. It uses the same batches as rayfed, so both must end with the same
weights up to rounding, which shows that they did the same work.
"""

import contextlib
import copy
import multiprocessing
import pickle
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Phase
from rayfed.core.ids import Moment
from rayfed.core.optim import SGD
from rayfed.core.rng import generator
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device_data import Normalise, batch_rows

State = dict[str, np.ndarray]


class BareClient(NamedTuple):
    """A client's number, its share of all training examples, and its normalised training data."""

    number: int
    weight: float
    x: Tensor
    y: Tensor


class BareLoop:
    """FedAvg on the clients of `population` with the local training of `plan`; a context manager.

    Args:
        plan: Provides the initial model, the learning rate of plain SGD, the batch size and the seed of the batches.
        population: The clients, all of which take part in every round.
        processes: The number of worker processes.
        channels_last: Whether to use the channels-last memory format instead of PyTorch's default, NCHW.

    Raises:
        ValueError: if `plan` asks for anything but one epoch of plain SGD on full batches.
    """

    def __init__(self, plan: Blueprint, population: Population, *, processes: int = 2, channels_last: bool):
        if plan.optimizer != SGD(lr=plan.optimizer.lr) or plan.local.epochs != 1 or not plan.drop_last:
            raise ValueError("the bare loop supports one epoch of plain SGD on full batches only")
        self.state = state_of(plan.model)
        self.rounds = 0
        self.steps = sum(len(client.train) // plan.batch_size for client in population.clients)
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for numbers in deal([len(client.train) for client in population.clients], processes):
            ours, theirs = spawn.Pipe()
            given = pickle.dumps((plan, population))  # as bytes, since multiprocessing shares tensors by files
            arguments = (theirs, given, numbers, channels_last)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def round(self) -> float:
        """Train every client once, set the state to the weighted mean, and return the seconds that it took."""
        began = time.perf_counter()
        self.rounds += 1
        for pipe in self._pipes:
            pipe.send((self.rounds, self.state))
        sums = [pipe.recv() for pipe in self._pipes]
        self.state = {name: np.asarray(sum(partial[name] for partial in sums)) for name in self.state}
        return time.perf_counter() - began

    def __enter__(self) -> "BareLoop":
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):  # the process died and has printed its traceback
                pipe.send(None)
            process.join()


class BareWorker:
    """Trains some clients of a population one after the other on one device.

    Args:
        plan: See `BareLoop`.
        numbers: The clients.
        channels_last: Whether to use the channels-last memory format.
    """

    def __init__(
        self,
        plan: Blueprint,
        population: Population,
        numbers: Iterable[int],
        device: str | torch.device = "cpu",
        *,
        channels_last: bool,
    ):
        self.device, self._lr, self._batch_size, self._seed = device, plan.optimizer.lr, plan.batch_size, plan.seed
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self._model = copy.deepcopy(plan.model).to(device=device, memory_format=layout).train()  # type: ignore[call-overload]
        total = sum(len(client.train) for client in population.clients)
        # with the roundings of rayfed, which training would magnify
        normalise = Normalise(population, torch.device(device), channels_last=channels_last)
        self._clients = []
        for number in numbers:
            examples = population.clients[number].train
            x, y = (torch.from_numpy(np.asarray(values)).to(device) for values in (examples.x, examples.y))
            self._clients.append(BareClient(number, len(examples) / total, normalise(x), y))

    def round(self, round: int, state: State) -> State:
        """Return the sum over the clients of weight · model after one epoch that starts from `state`."""
        start = {name: torch.from_numpy(value).to(self.device) for name, value in state.items()}
        sums = {name: torch.zeros_like(value) for name, value in start.items()}
        batches = []  # before the training, since the generator is slower while other work empties the caches
        for client in self._clients:
            rng = generator(self._seed, "batches", Moment("round", round), phase=0, client=client.number)
            drawn = batch_rows(len(client.y), Phase("train", 1), self._batch_size, drop_last=True, rng=rng)
            batches.append(torch.from_numpy(np.array(drawn)).to(self.device))
        for client, rows in zip(self._clients, batches, strict=True):
            epoch(self._model, start, client.x, client.y, rows, self._lr)
            for name, value in self._model.state_dict().items():
                if value.is_floating_point():
                    sums[name].add_(value, alpha=client.weight)
        return {name: value.cpu().numpy() for name, value in sums.items()}


def _serve(pipe: Connection, given: bytes, numbers: Sequence[int], channels_last: bool) -> None:
    torch.set_num_threads(1)
    plan, population = pickle.loads(given)
    worker = BareWorker(plan, population, numbers, channels_last=channels_last)
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(worker.round(*request))


def epoch(model: nn.Module, start: dict[str, Tensor], x: Tensor, y: Tensor, rows: Tensor, lr: float) -> None:
    """Load `start` into `model` and take one step of SGD for each batch, a row of example numbers in `rows`."""
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in rows:
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone().numpy() for name, value in model.state_dict().items()}


def largest_difference(weights: dict[str, Any], state: State) -> float:
    """Return the largest absolute difference between rayfed's weights and the bare loop's, integer buffers excluded."""
    names = [name for name in state if weights[name].is_floating_point()]
    return max(float((weights[name] - torch.from_numpy(state[name])).abs().max()) for name in names)


def deal(sizes: Sequence[int], processes: int) -> list[list[int]]:
    """Return the clients of each process: the largest first, each to the process with the fewest examples so far."""
    loads = [0] * processes
    homes: list[list[int]] = [[] for _ in range(processes)]
    for client in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        process = min(range(processes), key=lambda p: (loads[p], p))
        loads[process] += sizes[client]
        homes[process].append(client)
    return [sorted(home) for home in homes]
