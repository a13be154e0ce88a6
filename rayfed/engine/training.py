"""Local training of a block of clients: one after the other, or several at once with `torch.vmap`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import NO_DATA, Context, Exchange, Phase, State
from rayfed.augment.base import Augment
from rayfed.core.ids import ClientIndex
from rayfed.core.rng import generator, seed_torch
from rayfed.core.task import Batch
from rayfed.core.trees import clone, stack
from rayfed.engine.blocks import Pool, Rows, live_clients, train_block
from rayfed.engine.device_data import Part, batch_count, batch_rows


class Job(NamedTuple):
    """A client about to train: its index, its training data, its `work` and the context of its hooks.

    `rows` are the row numbers of all batches by phase, where they were drawn ahead (`draw_rows`).
    """

    client: ClientIndex
    part: Part
    work: State
    ctx: Context
    rows: Sequence[Rows] | None = None


class Trained(NamedTuple):
    """The result of local training: `work`, and the mean of each metric over the steps that returned it."""

    work: State
    metrics: dict[str, float]
    steps: int


def train(
    exchange: Exchange,
    jobs: Sequence[Job],
    down: State,
    phases: Sequence[Phase],
    *,
    seed: int,
    drop_last: bool,
    augment: Augment | None = None,
) -> list[Trained]:
    """Run all phases for all jobs, with `torch.vmap` if there is more than one job."""
    work = [clone(job.work) for job in jobs]  # private copies: steps may change them in place
    totals = [Sums() for _ in jobs]
    steps = [0] * len(jobs)
    parts = [job.part for job in jobs]
    together = augment is None and not exchange.prepares_batches and Pool.holds(parts)
    pool = Pool(parts) if together and len(jobs) > 1 else None
    for number, phase in enumerate(phases):
        drawn = [_drawn(job, phase, number, seed, drop_last) for job in jobs]
        ctx = jobs[0].ctx.at(phase=phase.name, data=NO_DATA)
        takes = [_taking(exchange, job, augment, seed, number) for job in jobs]
        clients = tuple(job.client for job in jobs)
        seed_torch(seed, "steps", ctx.moment, phase=number, clients=clients)
        if len(jobs) == 1:
            _loop(exchange, ctx, work, down, takes[0], _on_device(drawn[0], parts[0]), totals[0])
        else:
            ctx = ctx.at(client=-1, examples=0)  # common to all clients: a step finds what it needs of its own in work
            _train_block(exchange, ctx, work, down, takes, drawn, pool, parts, totals)
        steps = [done + len(some) for done, some in zip(steps, drawn, strict=True)]
    return [Trained(w, sums.means(), count) for w, sums, count in zip(work, totals, steps, strict=True)]


def steps_of(exchange: Exchange, ctx: Context, *, drop_last: bool) -> int:
    """Return the number of steps that a client with `ctx.examples` training examples takes."""
    return sum(
        batch_count(
            ctx.examples,
            phase.batch_size or ctx.batch_size,
            epochs=phase.epochs,
            steps=phase.steps,
            drop_last=drop_last,
        )
        for phase in exchange.phases(ctx)
    )


class Sums(dict[str, Tensor | float]):
    """The sum of each metric that the steps of a client have returned, and the number of steps that did."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def take(self, name: str, value: Tensor | float, steps: int = 1) -> None:
        """Add the value of a step, or the sum of those of several."""
        self[name] = self[name] + value if name in self else value
        self._counts[name] += steps

    def means(self) -> dict[str, float]:
        """Return the mean of each metric."""
        return {name: float(total) / self._counts[name] for name, total in self.items()}


Take = Callable[[Context, Tensor], Batch]


def _taking(exchange: Exchange, job: Job, augment: Augment | None, seed: int, number: int) -> Take:
    """Return a function from row numbers to the training batch; random draws are seeded for each batch."""
    part = job.part
    if augment is None and not exchange.prepares_batches:
        return lambda ctx, rows: part.take(rows)

    def take(ctx: Context, rows: Tensor) -> Batch:
        seed_torch(seed, "batch", job.ctx.moment, phase=number, client=job.client, step=ctx.step)
        batch = part.take(rows) if augment is None else part.augmented(rows, augment)
        if not exchange.prepares_batches:
            return batch
        return exchange.prepare(job.ctx.at(phase=ctx.phase, step=ctx.step), batch)

    return take


def _drawn(job: Job, phase: Phase, number: int, seed: int, drop_last: bool) -> Rows:
    """Return the row numbers of each batch."""
    if job.rows is not None:
        return job.rows[number]
    ctx = job.ctx.at(client=job.client)
    return draw_rows(ctx, len(job.part), phase, number, seed=seed, drop_last=drop_last)


def _on_device(batches: Rows, part: Part) -> list[Tensor]:
    """Return the row numbers of each batch where the client's data are indexed."""
    if not batches:
        return []
    if all(len(rows) == len(batches[0]) for rows in batches):  # one transfer for the phase
        return list(torch.from_numpy(np.stack(batches)).to(part.rows_device).unbind())
    return [torch.from_numpy(rows).to(part.rows_device) for rows in batches]


def draw_rows(ctx: Context, examples: int, phase: Phase, number: int, *, seed: int, drop_last: bool) -> Rows:
    """Return the row numbers of each batch of a phase, in the order of training.

    Args:
        ctx: The context of the client.
        examples: The number of its training examples.
        number: The position of the phase.
    """
    rng = generator(seed, "batches", ctx.moment, phase=number, client=ctx.client)
    size = phase.batch_size or ctx.batch_size
    return batch_rows(examples, size, epochs=phase.epochs, steps=phase.steps, drop_last=drop_last, rng=rng)


def _loop(
    exchange: Exchange,
    ctx: Context,
    work: list[State],
    down: State,
    take: Take,
    rows: list[Tensor],
    totals: Sums,
) -> None:
    for step, some in enumerate(rows):
        ctx.step = step
        work[0], metrics = exchange.step(ctx, work[0], down, take(ctx, some))
        for name, value in metrics.items():
            totals.take(name, value)


def _train_block(
    exchange: Exchange,
    ctx: Context,
    work: list[State],
    down: State,
    takes: Sequence[Take],
    drawn: Sequence[Rows],
    pool: Pool | None,
    parts: Sequence[Part],
    totals: Sequence[Sums],
) -> None:
    order = sorted(range(len(work)), key=lambda i: -len(drawn[i]))  # clients leave the block at its end
    counts = [len(drawn[i]) for i in order]
    if pool is None:
        rows = [_on_device(drawn[i], parts[i]) for i in order]
        batches = _one_by_one(ctx, [takes[i] for i in order], rows)
    else:
        batches = pool.batches(drawn, order)
    ends, sums = train_block(exchange, ctx, [work[i] for i in order], down, batches, counts)
    for i, end, metrics in zip(order, ends, sums.of_clients(), strict=True):
        work[i] = end
        for name, (total, count) in metrics.items():
            totals[i].take(name, total, count)


def _one_by_one(ctx: Context, takes: Sequence[Take], rows: Sequence[list[Tensor]]) -> Iterator[Batch]:
    """Yield the batches of a block, each client's taken by itself."""
    for step, live in enumerate(live_clients([len(some) for some in rows])):
        here = ctx.at(step=step)
        yield stack([take(here, some[step]) for take, some in zip(takes[:live], rows[:live], strict=True)])
