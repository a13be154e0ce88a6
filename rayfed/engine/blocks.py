"""Blocks of clients that train at once with `torch.vmap`.

A step takes the same number of operations for any number of clients, and none of them waits for the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import Context, Exchange, State
from rayfed.core.network import vectorised
from rayfed.core.task import Batch
from rayfed.core.trees import clone, stack, tree_map, unstack
from rayfed.engine.device_data import Part

Rows = list[np.ndarray]
"""The row numbers of each batch."""
_Result = tuple[State, dict[str, Tensor]]


class Pool:
    """The training examples of all clients of a block in one tensor, from which their batches are taken at once."""

    def __init__(self, parts: Sequence[Part]):
        self._normalise = parts[0].normalise
        self._x = torch.cat([part.x for part in parts if isinstance(part.x, Tensor)])
        self._y = torch.cat([part.y for part in parts])
        self._first = np.cumsum([0, *map(len, parts)])

    @staticmethod
    def holds(parts: Iterable[Part]) -> bool:
        """Return whether the inputs of all `parts` are on the device."""
        return all(isinstance(part.x, Tensor) for part in parts)

    def batches(self, rows: Sequence[Rows], order: Sequence[int]) -> Iterator[Batch]:
        """Yield the batch [clients, batch, ...] of each step, of those clients that still train.

        Args:
            rows: The row numbers of every client's batches, all of one size.
            order: The positions of the clients, those with the most batches first.
        """
        counts = [len(rows[i]) for i in order]
        if not counts[0]:
            return
        table = np.empty((counts[0], len(order), len(rows[order[0]][0])), dtype=np.int64)
        for place, (i, count) in enumerate(zip(order, counts, strict=True)):
            if count:
                table[:count, place] = np.stack(rows[i]) + self._first[i]
        on_device = torch.from_numpy(table).to(self._y.device)
        for step, live in enumerate(live_clients(counts)):
            some = on_device[step, :live]
            flat = some.flatten()
            x, y = self._normalise(self._x.index_select(0, flat)), self._y.index_select(0, flat)
            yield Batch(x.unflatten(0, some.shape), y.unflatten(0, some.shape))


def live_clients(counts: Sequence[int]) -> list[int]:
    """Return how many clients take part in each step, where the numbers of their steps fall."""
    steps: list[int] = (np.array(counts)[:, None] > np.arange(counts[0])).sum(0).tolist()
    return steps


class BlockSums:
    """The sum of each metric for each client of a block [clients], and the number of steps that returned it."""

    def __init__(self, clients: int):
        self._clients = clients
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, np.ndarray] = {}

    def take(self, metrics: dict[str, Tensor]) -> None:
        """Add what a step returned for the first clients, each metric a tensor [live clients]."""
        for name, values in metrics.items():
            if name not in self._sums:
                self._sums[name] = values.new_zeros(self._clients)
                self._counts[name] = np.zeros(self._clients, dtype=np.int64)
            self._sums[name][: len(values)] += values
            self._counts[name][: len(values)] += 1

    def of_clients(self) -> Iterator[dict[str, tuple[float, int]]]:
        """Yield each client's sums and counts by name."""
        sums = {name: values.tolist() for name, values in self._sums.items()}
        for i in range(self._clients):
            yield {name: (sums[name][i], int(self._counts[name][i])) for name in sums if self._counts[name][i]}


def train_block(
    exchange: Exchange,
    ctx: Context,
    work: Sequence[State],
    down: State,
    batches: Iterable[Batch],
    counts: Sequence[int],
) -> tuple[list[State], BlockSums]:
    """Train clients in step and return each client's `work`, and the sums of their metrics.

    Args:
        ctx: The context common to all clients: a step finds what it needs of its client in `work`.
        work: What each client starts from; it is not modified.
        batches: The batch [live clients, batch, ...] of each step.
        counts: The number of steps of each client; none is larger than the one before.
    """
    live, sums = sum(count > 0 for count in counts), BlockSums(len(work))
    ended = [clone(state) for state in work[live:]]
    if not live:
        return ended, sums
    block = stack(list(work[:live]))
    for step, (batch, still) in enumerate(zip(batches, live_clients(counts), strict=True)):
        if still < live:  # views: those that go on keep their tensors, and a step may change these in place
            ended = unstack(_slice(block, still, live), live - still) + ended
            block, live = _slice(block, 0, still), still
        block, metrics = _step(exchange, ctx.at(step=step), block, down, batch)
        sums.take(metrics)
    return unstack(block, live) + ended, sums


def _step(exchange: Exchange, ctx: Context, work: State, down: State, batch: Batch) -> _Result:
    """Take the step of a block of clients."""

    def one(state: State, batch: Any) -> _Result:
        return exchange.step(ctx, state, down, batch)

    with vectorised():
        result: _Result = torch.vmap(one, randomness="different")(work, batch)
    return result


def _slice(block: State, start: int, stop: int) -> State:
    sliced: State = tree_map(lambda value: value[start:stop], block)
    return sliced
