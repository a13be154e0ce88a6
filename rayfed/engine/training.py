"""Local training: clients one after the other, or a block of clients at once with `torch.vmap`.

A step of a block takes the same number of operations for any number of clients, and none of them waits for the device.
Only the draws of an augmentation, and batches that each client makes alone (`_stacked`), take more for more clients.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import NO_DATA, Context, Delegate, Exchange, Phase, State
from rayfed.augment.base import Augment
from rayfed.core.ids import ClientIndex
from rayfed.core.network import vectorised
from rayfed.core.rng import Streams, generator
from rayfed.core.task import Batch
from rayfed.core.trees import clone, stack, tree_map
from rayfed.engine.device import breaks_device
from rayfed.engine.device_data import Part, batch_count, batch_rows
from rayfed.engine.graphs import GraphedStep, Result, Step, StepGraphs

Rows = list[np.ndarray]
"""The row numbers of each batch."""
Phases = Sequence[tuple[Phase, Rows]]
"""A client's phases, each with its batches."""
SeedBatch = Callable[..., None]
"""Seeds the random draws of a client's batch; called with `step=`."""

WIDTHS = (1, 4, 16, 64, 256)
"""The numbers of clients that `fastest_width` tries."""
_SECONDS = 0.1  # the time for the repetitions of a block
_LONGEST = 1.0  # seconds of a block, after which no larger block is tried
_TIE, _SLOWER = 1.05, 1.5  # times the shortest time per client


class Job(NamedTuple):
    """A client about to train `work` on `part`, with its state before training and what it received."""

    client: ClientIndex
    part: Part
    phases: Phases
    work: State
    ctx: Context
    state: State
    down: State


class Trained(NamedTuple):
    """The result of local training: `work`, and the mean of each metric over the steps that returned it."""

    work: State
    metrics: dict[str, float]


def train(
    exchange: Exchange,
    jobs: Sequence[Job],
    streams: Streams,
    augment: Augment | None = None,
    graphs: StepGraphs | None = None,
) -> list[Trained]:
    """Run all phases for all jobs, with `torch.vmap` if there is more than one job, from `graphs` if there are."""
    # steps may change the copies of clients in place; a block stacks them, which copies
    work = [clone(job.work) if len(jobs) == 1 else job.work for job in jobs]
    totals = [_Sums() for _ in jobs]
    parts, down = [job.part for job in jobs], jobs[0].down  # the fields that a step reads are common to all clients
    takes_rows = (augment is None or augment.draws_apart) and not exchange.prepares_batches
    on_device = all(isinstance(part.x, Tensor) for part in parts)
    pool = Pool(parts, augment) if takes_rows and len(jobs) > 1 and on_device else None
    for number, phases in enumerate(zip(*(job.phases for job in jobs), strict=True)):
        ctx = jobs[0].ctx.at(phase=phases[0][0].name, data=NO_DATA)
        streams.begin("steps", ctx.moment, phase=number, clients=tuple(job.client for job in jobs))
        seeds = [partial(streams.begin, "batch", job.ctx.moment, phase=number, client=job.client) for job in jobs]
        own = [_batches(exchange, job, number, augment, each) for job, each in zip(jobs, seeds, strict=True)]
        if len(jobs) == 1:
            take_step: Step = exchange.step if graphs is None else GraphedStep(graphs, exchange, exchange.step)
            for step, batch in enumerate(own[0]):
                ctx.step = step
                work[0], metrics = take_step(ctx, work[0], down, batch)
                for name, value in metrics.items():
                    totals[0].take(name, value)
            work[0] = work[0] if graphs is None else clone(work[0])  # a graph's memory is that of the next client
            continue
        ctx = ctx.at(client=-1, examples=0)  # common to all clients: a step finds what is its client's in `work`
        drawn = [rows for _, rows in phases]
        order = sorted(range(len(jobs)), key=lambda i: -len(drawn[i]))  # clients leave the block at its end
        counts = [len(drawn[i]) for i in order]
        batches = _stacked([own[i] for i in order], counts) if pool is None else pool.batches(drawn, order, seeds)
        ends, sums = train_block(exchange, ctx, [work[i] for i in order], down, batches, counts, graphs)
        for i, end, of_client in zip(order, ends, sums.of_clients(), strict=True):
            work[i] = end
            for name, (total, count) in of_client.items():
                totals[i].take(name, total, count)
    return [Trained(state, sums.means()) for state, sums in zip(work, totals, strict=True)]


@dataclass(frozen=True)
class InBf16(Delegate):
    """An exchange whose steps compute in bfloat16 where `torch.autocast` does."""

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Result:
        # A cast that is kept would be that of the weights before an update in the same step.
        with torch.autocast(ctx.task.device.type, torch.bfloat16, cache_enabled=False):
            return self.target.step(ctx, work, down, batch)


def steps_of(exchange: Exchange, ctx: Context, *, drop_last: bool) -> int:
    """Return the number of steps that a client with `ctx.examples` training examples takes."""
    phases = exchange.phases(ctx)
    return sum(batch_count(ctx.examples, phase, ctx.batch_size, drop_last=drop_last) for phase in phases)


def draw_phases(exchange: Exchange, ctx: Context, *, seed: int, drop_last: bool) -> Phases:
    """Return a client's phases, each with the row numbers of its batches in the order of training."""
    drawn = []
    for number, phase in enumerate(exchange.phases(ctx)):
        rng = generator(seed, "batches", ctx.moment, phase=number, client=ctx.client)
        drawn.append((phase, batch_rows(ctx.examples, phase, ctx.batch_size, drop_last=drop_last, rng=rng)))
    return drawn


class _Sums(dict[str, Tensor | float]):
    """The sum of each metric that the steps of a client have returned, and the number of steps that did."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def take(self, name: str, value: Tensor | float, steps: int = 1) -> None:
        """Add the value of a step, or the sum of several steps."""
        self[name] = self[name] + value if name in self else value
        self._counts[name] += steps

    def means(self) -> dict[str, float]:
        """Return the mean of each metric, after one wait for the device."""
        scalars = [total.double().flatten() for total in self.values() if isinstance(total, Tensor)]
        known = iter(torch.cat(scalars).tolist() if scalars else ())
        totals = {name: next(known) if isinstance(total, Tensor) else total for name, total in self.items()}
        return {name: total / self._counts[name] for name, total in totals.items()}


def _batches(exchange: Exchange, job: Job, number: int, augment: Augment | None, seed: SeedBatch) -> Iterator[Batch]:
    """Yield a client's batches of the phase at position `number`; random draws are seeded for each batch."""
    phase, drawn = job.phases[number]
    if not drawn:
        return
    part, sizes = job.part, [len(rows) for rows in drawn]
    rows = torch.from_numpy(np.concatenate(drawn)).to(part.rows_device, non_blocking=True)  # one transfer for the phase
    if augment is None and not exchange.prepares_batches:
        yield from part.taken(rows, sizes)
        return
    for step, here in enumerate(rows.split(sizes)):
        seed(step=step)
        batch = part.take(here) if augment is None else part.augmented(here, augment)
        yield exchange.prepare(job.ctx.at(phase=phase.name, step=step), batch) if exchange.prepares_batches else batch


def _stacked(batches: Sequence[Iterator[Batch]], counts: Sequence[int]) -> Iterator[Batch]:
    """Yield the batches of a block where each client takes its own."""
    for live in _live_clients(counts):
        yield stack([next(own) for own in batches[:live]])


class Pool:
    """The training examples of all clients of a block in one tensor, from which their batches are taken at once."""

    def __init__(self, parts: Sequence[Part], augment: Augment | None = None):
        self._normalise, self._augment = parts[0].normalise, augment
        self._x = torch.cat([part.x for part in parts if isinstance(part.x, Tensor)])
        self._y = torch.cat([part.y for part in parts])
        self._first = np.cumsum([0, *map(len, parts)])

    def batches(self, rows: Sequence[Rows], order: Sequence[int], seeds: Sequence[SeedBatch]) -> Iterator[Batch]:
        """Yield the batch [clients, batch, ...] of each step, of the clients that still train.

        Args:
            rows: The row numbers of every client's batches, all of one size.
            order: The positions of the clients, those with the most batches first.
            seeds: For each client what seeds the draws of an augmentation.
        """
        counts = [len(rows[i]) for i in order]
        if not counts[0]:
            return
        table = np.empty((counts[0], len(order), len(rows[order[0]][0])), dtype=np.int64)
        for place, (i, count) in enumerate(zip(order, counts, strict=True)):
            if count:
                table[:count, place] = np.stack(rows[i]) + self._first[i]
        on_device = torch.from_numpy(table).to(self._y.device, non_blocking=True)
        for step, live in enumerate(_live_clients(counts)):
            now = on_device[step, :live]
            flat = now.flatten()
            x, y = self._x.index_select(0, flat), self._y.index_select(0, flat)
            if self._augment is None:
                x = self._normalise(x)
            else:
                x = self._normalise.augmented(x, self._augment, [partial(seeds[i], step=step) for i in order[:live]])
            yield Batch(x.unflatten(0, now.shape), y.unflatten(0, now.shape))


def _live_clients(counts: Sequence[int]) -> list[int]:
    """Return how many clients take part in each step; `counts` are their steps, in descending order."""
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
        names, counts = list(self._sums), [steps.tolist() for steps in self._counts.values()]
        sums = torch.stack([values.double() for values in self._sums.values()]).tolist() if names else []
        for i in range(self._clients):
            yield {
                name: (total[i], steps[i]) for name, total, steps in zip(names, sums, counts, strict=True) if steps[i]
            }


def train_block(
    exchange: Exchange,
    ctx: Context,
    work: Sequence[State],
    down: State,
    batches: Iterable[Batch],
    counts: Sequence[int],
    graphs: StepGraphs | None = None,
) -> tuple[list[State], BlockSums]:
    """Train the clients of a block, and return each client's `work` and the sums of their metrics.

    Args:
        work: What each client starts from; it is not modified.
        batches: The batch [live clients, batch, ...] of each step.
        counts: The number of steps of each client, in descending order.
        graphs: Where there are some, steps are replayed from them.
    """

    def at_once(ctx: Context, block: State, down: State, batch: Batch) -> Result:
        with vectorised():
            step = torch.vmap(partial(exchange.step, ctx), in_dims=(0, None, 0), randomness="different")
            result: Result = step(block, down, batch)
        return result

    take_step: Step = at_once if graphs is None else GraphedStep(graphs, exchange, at_once)
    kept = clone if graphs is not None else lambda block: block  # a graph's memory is that of the next block
    live, sums = sum(count > 0 for count in counts), BlockSums(len(work))
    ended = [clone(state) for state in work[live:]]
    if not live:
        return ended, sums
    block = stack(list(work[:live]))
    for step, (batch, still) in enumerate(zip(batches, _live_clients(counts), strict=True)):
        if still < live:  # slices are views: the clients that go on keep their tensors, which a step may change
            ended = _clients_of(kept(tree_map(itemgetter(slice(still, live)), block)), live - still) + ended
            block, live = tree_map(itemgetter(slice(still)), block), still
        block, metrics = take_step(ctx.at(step=step), block, down, batch)
        sums.take(metrics)
    return _clients_of(kept(block), live) + ended, sums


def _clients_of(block: State, count: int) -> list[State]:
    """Return the state of each client of a block, as views that share no memory with each other."""
    split: list[tuple[Tensor, ...]] = []
    tree_map(lambda value: split.append((value if value.stride(0) else value.clone()).detach().unbind()), block)

    def of_client(i: int) -> State:
        left = iter(split)
        state: State = tree_map(lambda _: next(left)[i], block)
        return state

    return [of_client(i) for i in range(count)]


def fastest_width(most: int, block: Callable[[int], object], clock: Callable[[], float]) -> int:
    """Return how many clients to train at once: the least number whose time per client is within 5 % of the shortest.

    `block` trains so many clients, at most `most`, and `clock` returns the time in seconds. More clients are tried
    until a block takes more than a second or 50 % longer per client, or fails because the memory is out or `torch.vmap`
    refuses the step. A number may be a little slower than the number before: on a CPU, 4 clients often are and 16 are
    not.
    """
    each: dict[int, float] = {}
    for width in sorted({min(width, most) for width in WIDTHS if most > 1}):
        try:
            each[width] = _seconds(partial(block, width), clock) / width
        except Exception as error:
            if width == 1 or breaks_device(error):
                raise
            break
        if each[width] > _SLOWER * min(each.values()) or width * each[width] > _LONGEST:
            break
    return next((width for width, seconds in each.items() if seconds <= _TIE * min(each.values())), 1)


def _seconds(block: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest time of a block, after a first block that loads kernels."""
    block()
    times, end = list[float](), clock() + _SECONDS
    while not times or clock() < end:
        began = clock()
        block()
        times.append(clock() - began)
    return min(times)
