"""Local training of a block of clients: one after the other, or several at once with `torch.vmap`."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import NO_DATA, Context, Exchange, Phase, State
from rayfed.augment.base import Augment
from rayfed.core.ids import ClientIndex
from rayfed.core.network import vectorised
from rayfed.core.rng import generator, seed_torch
from rayfed.core.task import Batch
from rayfed.core.trees import clone, stack, tree_map, unstack
from rayfed.engine.device_data import Part, batch_count, batch_rows

Rows = list[np.ndarray]
"""The row numbers of each batch."""


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
    for number, phase in enumerate(phases):
        rows = [_rows(job, phase, number, seed, drop_last) for job in jobs]
        ctxs = [job.ctx.at(phase=phase.name, data=NO_DATA) for job in jobs]
        takes = [_taking(exchange, job, augment, seed, number) for job in jobs]
        clients = tuple(job.client for job in jobs)
        seed_torch(seed, "steps", jobs[0].ctx.moment, phase=number, clients=clients)
        if len(jobs) == 1:
            _loop(exchange, ctxs[0], work, down, takes[0], rows[0], totals[0])
        else:
            work = _vmap(exchange, ctxs[0], work, down, takes, rows, totals)
        steps = [done + len(some) for done, some in zip(steps, rows, strict=True)]
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


class Sums(dict[str, Tensor]):
    """The sum of each metric that the steps of a client have returned, and the number of steps that did."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def take(self, name: str, value: Tensor) -> None:
        """Add the value of a step."""
        self[name] = self[name] + value if name in self else value
        self._counts[name] += 1

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


def _rows(job: Job, phase: Phase, number: int, seed: int, drop_last: bool) -> list[Tensor]:
    """Return the row numbers of each batch where the client's data are indexed."""
    if job.rows is not None:
        batches = job.rows[number]
    else:
        ctx = job.ctx.at(client=job.client)
        batches = draw_rows(ctx, len(job.part), phase, number, seed=seed, drop_last=drop_last)
    if not batches:
        return []
    device = job.part.rows_device
    if all(len(rows) == len(batches[0]) for rows in batches):  # one transfer for the phase
        return list(torch.from_numpy(np.stack(batches)).to(device).unbind())
    return [torch.from_numpy(rows).to(device) for rows in batches]


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
    state = work[0]
    for step, some in enumerate(rows):
        ctx.step = step
        state, metrics = exchange.step(ctx, state, down, take(ctx, some))
        for name, value in metrics.items():
            totals.take(name, value)
    work[0] = state


def _vmap(
    exchange: Exchange,
    ctx: Context,
    work: list[State],
    down: State,
    takes: list[Take],
    rows: list[list[Tensor]],
    totals: list[Sums],
) -> list[State]:
    """Train all clients in step; those with fewer batches repeat their last one at the end, without effect."""
    counts = [len(some) for some in rows]
    if not max(counts):
        return work
    ctx = ctx.at(client=-1, examples=0)  # common to all clients: a step finds what it needs of its client in `work`
    stacked = stack(work)
    for step in range(max(counts)):
        here = ctx.at(step=step)
        batch = stack([take(here, some[min(step, len(some) - 1)]) for take, some in zip(takes, rows, strict=True)])
        live = torch.tensor([step < count for count in counts], device=batch.y.device)
        before = None if min(counts) > step else clone(stacked)

        def one(state: State, batch: Any, here: Context = here) -> tuple[State, dict[str, Tensor]]:
            return exchange.step(here, state, down, batch)

        with vectorised():
            stacked, metrics = torch.vmap(one, randomness="different")(stacked, batch)
        if before is not None:
            stacked = tree_map(lambda new, old, live=live: torch.where(_like(live, new), new, old), stacked, before)
        for name, values in metrics.items():
            for index, sums in enumerate(totals):
                if step < counts[index]:
                    sums.take(name, values[index])
    return unstack(stacked, len(work))


def _like(live: Tensor, value: Tensor) -> Tensor:
    return live.view(-1, *[1] * (value.dim() - 1))
