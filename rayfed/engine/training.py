"""Local training: clients one after the other, or a block of clients at once with `torch.vmap`.

A step of a block takes the same number of operations for any number of clients, and none of them waits for the device.
Only the draws of an augmentation, and batches that each client makes alone (`_stacked`), take more for more clients.
"""

import itertools
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
from rayfed.core.errors import breaks_device
from rayfed.core.ids import ClientIndex
from rayfed.core.network import vectorised, weights_stay
from rayfed.core.private_gradients import of_one_size
from rayfed.core.rng import Streams, generator
from rayfed.core.task import Batch
from rayfed.core.trees import clone, stack, tree_map
from rayfed.engine.device_data import Part, batch_count, batch_rows, poisson_rows
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
# times the shortest time per client
_TIE = 1.05
_SLOWER = 1.5


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


@dataclass
class TrainedBlock:
    """What the clients of a block have trained, perhaps before the device has finished.

    Attributes:
        jobs: The clients.
        work: The `work` of each.
        sums: Returns the sums of each client's metrics, after a wait for the device.
    """

    jobs: list[Job]
    work: list[State]
    sums: "Callable[[], list[_Sums]]"

    def clients(self) -> Iterator[tuple[Job, Trained]]:
        """Yield each client with its result, which is not kept here."""
        for sums in self.sums():
            yield self.jobs.pop(0), Trained(self.work.pop(0), sums.means())


def train(
    exchange: Exchange,
    jobs: Sequence[Job],
    streams: Streams,
    augment: Augment | None = None,
    graphs: StepGraphs | None = None,
) -> TrainedBlock:
    """Run all phases for all jobs, with `torch.vmap` if there is more than one job, from `graphs` if there are."""
    if len(jobs) == 1:
        return _train_alone(exchange, jobs[0], streams, augment, graphs)
    return _train_together(exchange, jobs, streams, augment, graphs)


def _train_alone(
    exchange: Exchange, job: Job, streams: Streams, augment: Augment | None, graphs: StepGraphs | None
) -> TrainedBlock:
    """Run all phases for one client."""
    work = clone(job.work)  # steps may change it in place
    totals = _Sums()
    take_step: Step = exchange.step
    for number in range(len(job.phases)):
        ctx = _begin_phase(streams, [job], number)
        if graphs is not None:
            take_step = GraphedStep(graphs, exchange, exchange.step)
        batches = _batches(exchange, job, number, augment, _seed_of(streams, job, number))
        with weights_stay():
            for step, batch in enumerate(batches):
                ctx.step = step
                work, metrics = take_step(ctx, work, job.down, batch)
                for name, value in metrics.items():
                    totals.take(name, value)
        if graphs is not None:
            work = clone(work)  # a graph's memory is that of the next client
    return TrainedBlock([job], [work], lambda: [totals])


def _train_together(
    exchange: Exchange, jobs: Sequence[Job], streams: Streams, augment: Augment | None, graphs: StepGraphs | None
) -> TrainedBlock:
    """Run all phases for several clients at once; those with the most batches come first in the block."""
    work = [job.work for job in jobs]  # a block stacks them, which copies
    down = jobs[0].down  # the fields that a step reads are common to all clients
    of_phases: list[tuple[list[int], BlockSums]] = []
    pool = _pool_of(exchange, jobs, augment)
    for number, phases in enumerate(zip(*(job.phases for job in jobs), strict=True)):
        # common to all clients: a step finds what is its client's in `work`
        ctx = _begin_phase(streams, jobs, number).at(client=-1, examples=0)
        seeds = []
        for job in jobs:
            seeds.append(_seed_of(streams, job, number))
        drawn = [rows for _, rows in phases]
        order = sorted(range(len(jobs)), key=lambda i: -len(drawn[i]))  # clients leave the block at its end
        counts = [len(drawn[i]) for i in order]
        if pool is None:
            own = [_batches(exchange, jobs[i], number, augment, seeds[i]) for i in order]
            batches = _stacked(own, counts)
        else:
            batches = pool.batches(drawn, order, seeds)
        ends, sums = train_block(exchange, ctx, [work[i] for i in order], down, batches, counts, graphs)
        of_phases.append((order, sums))
        for i, end in zip(order, ends, strict=True):
            work[i] = end
    return TrainedBlock(list(jobs), work, partial(_sums_of_clients, of_phases, len(jobs)))


def _sums_of_clients(of_phases: "Sequence[tuple[list[int], BlockSums]]", count: int) -> "list[_Sums]":
    """Return the sums of each of `count` clients over all phases; each phase has the clients in its own order."""
    totals = [_Sums() for _ in range(count)]
    for order, sums in of_phases:
        for i, of_client in zip(order, sums.of_clients(), strict=True):
            for name, (total, steps) in of_client.items():
                totals[i].take(name, total, steps)
    return totals


def _begin_phase(streams: Streams, jobs: Sequence[Job], number: int) -> Context:
    """Seed the draws of the steps of the phase at position `number`, and return the context of the first client."""
    phase, _ = jobs[0].phases[number]
    ctx = jobs[0].ctx.at(phase=phase.name, data=NO_DATA)
    clients = tuple(job.client for job in jobs)
    streams.begin("steps", ctx.moment, phase=number, clients=clients)
    return ctx


def _seed_of(streams: Streams, job: Job, number: int) -> SeedBatch:
    """Return what seeds the draws for a client's batches in the phase at position `number`."""
    return partial(streams.begin, "batch", job.ctx.moment, phase=number, client=job.client)


def _pool_of(exchange: Exchange, jobs: Sequence[Job], augment: Augment | None) -> "Pool | None":
    """Return the examples of all clients in one tensor; None if batches cannot be taken from it at once."""
    if exchange.prepares_batches or not (augment is None or augment.draws_apart):
        return None
    parts = [job.part for job in jobs]
    if not all(isinstance(part.x, Tensor) for part in parts):
        return None
    return Pool(parts, augment)


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
    counts = []
    for phase in phases:
        counts.append(batch_count(ctx.examples, phase, ctx.batch_size, drop_last=drop_last))
    return sum(counts)


def draw_phases(exchange: Exchange, ctx: Context, *, seed: int, drop_last: bool) -> Phases:
    """Return a client's phases, each with the row numbers of its batches in the order of training."""
    drawn = []
    draw = batch_rows
    if exchange.draws_poisson:
        draw = poisson_rows
    for number, phase in enumerate(exchange.phases(ctx)):
        rng = generator(seed, "batches", ctx.moment, phase=number, client=ctx.client)
        rows = draw(ctx.examples, phase, ctx.batch_size, drop_last=drop_last, rng=rng)
        drawn.append((phase, rows))
    return drawn


class _Sums(dict[str, Tensor | float]):
    """The sum of each metric that the steps of a client have returned, and the number of steps that did."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def take(self, name: str, value: Tensor | float, steps: int = 1) -> None:
        """Add the value of a step, or the sum of several steps."""
        if name in self:
            self[name] = self[name] + value
        else:
            self[name] = value
        self._counts[name] += steps

    def means(self) -> dict[str, float]:
        """Return the mean of each metric, after one wait for the device."""
        scalars = []
        for total in self.values():
            if isinstance(total, Tensor):
                scalars.append(total.double().flatten())
        known: Iterator[float] = iter(())
        if scalars:
            known = iter(torch.cat(scalars).tolist())
        means = {}
        for name, total in self.items():
            if isinstance(total, Tensor):
                total = next(known)
            means[name] = total / self._counts[name]
        return means


def _batches(exchange: Exchange, job: Job, number: int, augment: Augment | None, seed: SeedBatch) -> Iterator[Batch]:
    """Yield a client's batches of the phase at position `number`; random draws are seeded for each batch."""
    phase, drawn = job.phases[number]
    if not drawn:
        return
    part = job.part
    sizes = [len(rows) for rows in drawn]
    rows = torch.from_numpy(np.concatenate(drawn)).to(part.rows_device, non_blocking=True)  # one transfer for the phase
    if augment is None and not exchange.prepares_batches:
        yield from part.taken(rows, sizes)
        return
    for step, here in enumerate(rows.split(sizes)):
        seed(step=step)
        if augment is None:
            batch = part.take(here)
        else:
            batch = part.augmented(here, augment)
        if exchange.prepares_batches:
            batch = exchange.prepare(job.ctx.at(phase=phase.name, step=step), batch)
        yield batch


def _stacked(batches: Sequence[Iterator[Batch]], counts: Sequence[int]) -> Iterator[Batch]:
    """Yield the batches of a block where each client takes its own."""
    for live in _live_clients(counts):
        now = [next(own) for own in batches[:live]]
        yield stack(of_one_size(now))


class Pool:
    """The training examples of all clients of a block in one tensor, from which their batches are taken at once.

    It is the tensor of all clients' examples where they have one, and else those of the block are joined.
    """

    def __init__(self, parts: Sequence[Part], augment: Augment | None = None):
        self._normalise = parts[0].normalise
        self._augment = augment
        places = [part.rows for part in parts if part.rows is not None]
        if len(places) == len(parts):
            self._x, self._y, _ = places[0]
            self._first = [place.first for place in places]
            return
        inputs = []
        for part in parts:
            if isinstance(part.x, Tensor):
                inputs.append(part.x)
        self._x = torch.cat(inputs)
        self._y = torch.cat([part.y for part in parts])
        self._first = list(itertools.accumulate(map(len, parts), initial=0))

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
        batch_size = len(rows[order[0]][0])
        table = np.empty((counts[0], len(order), batch_size), dtype=np.int64)
        for place, (i, count) in enumerate(zip(order, counts, strict=True)):
            if count:
                of_client = np.concatenate(rows[i]).reshape(count, batch_size)
                table[:count, place] = of_client + self._first[i]
        on_device = torch.from_numpy(table).to(self._y.device, non_blocking=True)
        for step, live in enumerate(_live_clients(counts)):
            now = on_device[step, :live]
            flat = now.flatten()
            x = self._x.index_select(0, flat)
            y = self._y.index_select(0, flat)
            if self._augment is None:
                x = self._normalise(x)
            else:
                of_step = [partial(seeds[i], step=step) for i in order[:live]]
                x = self._normalise.augmented(x, self._augment, of_step)
            yield Batch(x.unflatten(0, now.shape), y.unflatten(0, now.shape))


def _live_clients(counts: Sequence[int]) -> list[int]:
    """Return how many clients take part in each step; `counts` are their steps, in descending order."""
    trains = np.array(counts)[:, None] > np.arange(counts[0])  # [clients, steps]
    live: list[int] = trains.sum(0).tolist()
    return live


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
        counts = [steps.tolist() for steps in self._counts.values()]
        sums = []
        if counts:
            doubles = []
            for values in self._sums.values():
                doubles.append(values.double())
            sums = torch.stack(doubles).tolist()
        for i in range(self._clients):
            of_client = {}
            for name, total, steps in zip(self._sums, sums, counts, strict=True):
                if steps[i]:
                    of_client[name] = (total[i], steps[i])
            yield of_client


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

    def kept(block: State) -> State:
        """Return a block whose memory is its own; a graph's memory is that of the next block."""
        if graphs is None:
            return block
        own: State = clone(block)
        return own

    take_step: Step = at_once
    if graphs is not None:
        take_step = GraphedStep(graphs, exchange, at_once)
    live = sum(count > 0 for count in counts)
    sums = BlockSums(len(work))
    ended = []
    for state in work[live:]:
        ended.append(clone(state))
    if not live:
        return ended, sums
    block = stack(list(work[:live]))
    for step, (batch, still) in enumerate(zip(batches, _live_clients(counts), strict=True)):
        if still < live:  # slices are views: the clients that go on keep their tensors, which a step may change
            leaving = tree_map(itemgetter(slice(still, live)), block)
            ended = _clients_of(kept(leaving), live - still) + ended
            del leaving  # a slice would keep the whole block
            block = tree_map(itemgetter(slice(still)), block)
            live = still
        block, metrics = take_step(ctx.at(step=step), block, down, batch)
        sums.take(metrics)
    return _clients_of(kept(block), live) + ended, sums


def _clients_of(block: State, count: int) -> list[State]:
    """Return the state of each client of a block, as views that share no memory with each other."""
    split: list[tuple[Tensor, ...]] = []

    def divide(value: Tensor) -> None:
        if not value.stride(0):
            value = value.clone()
        split.append(value.detach().unbind())

    tree_map(divide, block)

    def of_client(i: int) -> State:
        left = iter(split)
        state: State = tree_map(lambda _: next(left)[i], block)
        return state

    return [of_client(i) for i in range(count)]


def fastest_width(most: int, block: Callable[[int], object], clock: Callable[[], float]) -> int:
    """Return how many clients to train at once: the least number whose time per client is within 5 % of the shortest.

    `block` trains so many clients, at most `most`, and `clock` returns the time in seconds. More clients are tried
    until a block takes more than a second, or 50 % longer per client. They are not tried either after a block has
    failed, because the memory is out or `torch.vmap` refuses the step. A number may be a little slower than the number
    before: on a CPU, 4 clients often are and 16 are not.
    """
    each: dict[int, float] = {}
    for width in sorted({min(width, most) for width in WIDTHS if most > 1}):
        try:
            each[width] = _seconds(partial(block, width), clock) / width
        except Exception as error:
            if width == 1 or breaks_device(error):
                raise
            break
        if each[width] > _SLOWER * min(each.values()):
            break
        if width * each[width] > _LONGEST:
            break
    for width, seconds in each.items():
        if seconds <= _TIE * min(each.values()):
            return width
    return 1


def _seconds(block: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest time of a block, after a first block that loads kernels."""
    block()
    times = list[float]()
    end = clock() + _SECONDS
    while not times or clock() < end:
        began = clock()
        block()
        times.append(clock() - began)
    return min(times)
