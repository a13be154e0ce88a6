"""The timetable of an asynchronous simulation, which is known before anything trains.

Durations depend on steps, speeds, bytes and the seed, and never on weights. So the order of all starts and replies
follows from an event queue alone.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.rng import generator, global_state_kept
from rayfed.core.round_schedule import Buffered
from rayfed.core.trees import nbytes
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.clock import Device
from rayfed.engine.training import steps_of


class Update(NamedTuple):
    """An update of the server. Versions of the model are counted by the updates that made them.

    Attributes:
        clients: The clients whose replies it takes, in ascending order.
        starts: The version that each of them started from.
        starting: The clients that started from the version before the update, in ascending order.
        dropped: The clients whose replies were too stale, each with the version that it started from.
        seconds: The time on the clock.
        under_way: The number of clients that are training then.
    """

    clients: tuple[ClientIndex, ...]
    starts: tuple[int, ...]
    starting: tuple[ClientIndex, ...]
    dropped: tuple[tuple[ClientIndex, int], ...]
    seconds: float
    under_way: int

    @property
    def replies(self) -> tuple[tuple[ClientIndex, int], ...]:
        """The clients whose replies it takes, each with the version that it started from."""
        return tuple(zip(self.clients, self.starts, strict=True))


class Durations:
    """How long clients take for a round on the clock."""

    def __init__(self, blueprint: Blueprint, population: Population):
        self._blueprint = blueprint
        self._population = population
        self._ctx = blueprint.context(population, "cpu")
        self._examples = blueprint.training_examples(population)
        self._devices: dict[ClientIndex, Device] = {}
        self._bytes: dict[int, tuple[int, int]] = {}  # by the number of examples

    def end(self, client: ClientIndex, round: int, cohort: Sequence[ClientIndex], start: float) -> float:
        """Return when a client that starts on a round at `start` has replied."""
        blueprint = self._blueprint
        moment = Moment("round", round)
        local = blueprint.availability.local_work(self._ctx.local, blueprint.seed, moment, client)
        examples = int(self._examples[client])
        ctx = self._ctx.at(moment, client=client, examples=examples, cohort=tuple(cohort), local=local)
        exchanges = blueprint.algorithm.round_exchanges
        steps = sum(steps_of(exchange, ctx, drop_last=blueprint.drop_last) for exchange in exchanges)
        if client not in self._devices:
            self._devices[client] = blueprint.clock.device(blueprint.seed, client)
        if blueprint.clock.sends and examples not in self._bytes:
            self._bytes[examples] = self._measured(client)
        sizes = self._bytes.get(examples, (0, 0))
        return blueprint.clock.end(self._devices[client], start, steps, *sizes)

    def _measured(self, client: ClientIndex) -> tuple[int, int]:
        """Return the bytes that a client receives and sends, as the hooks return them without a step of training.

        Clients with equally many examples are taken to receive and send as much.
        """
        blueprint = self._blueprint
        with global_state_kept():
            blueprint.streams.begin("init")
            (exchange,) = blueprint.algorithm.round_exchanges
            server = blueprint.algorithm.init(self._ctx)
            ctx = self._ctx.at(Moment("round", 1), cohort=(client,))
            ctx = blueprint.client_context(ctx, self._population, client)
            down = exchange.broadcast(ctx, server) | exchange.unicast(ctx, server)
            state = blueprint.algorithm.join(ctx)
            work = exchange.start(ctx, state, down)
            _, up = exchange.finish(ctx, work, state, down, ctx.data)
            return nbytes(down), sum(exchange.sent_bytes(up).values())


def timetable(
    schedule: Buffered,
    clients: int,
    end: Callable[[ClientIndex, int, Sequence[ClientIndex], float], float],
    *,
    seed: int,
    server_seconds: float = 0.0,
) -> Iterator[Update]:
    """Yield the updates of the server, one after the other.

    Whenever fewer than `concurrency` clients train, more are drawn uniformly among those that neither train nor have a
    reply in the buffer. Replies that arrive at the same time are taken in the order of the clients, and before others
    start. The first draw from a version is that of a synchronous round with the same number.

    Args:
        clients: The number of clients.
        end: `Durations.end`.
    """
    training: list[tuple[float, ClientIndex, int]] = []  # a heap: when it ends, whose it is, the version at its start
    now = 0.0
    version = 0
    while True:
        rng = generator(seed, "cohort", round=version + 1)
        buffer: dict[ClientIndex, int] = {}
        starting: list[ClientIndex] = []
        dropped: list[tuple[ClientIndex, int]] = []
        while len(buffer) < schedule.buffer:
            busy = {*buffer, *(job[1] for job in training)}
            drawn = _drawn(schedule.concurrency - len(training), clients, busy, rng)
            for client in drawn:
                job = (end(client, version + 1, drawn, now), client, version)
                heapq.heappush(training, job)
            starting += drawn
            now = max(now, training[0][0])
            while training and training[0][0] <= now and len(buffer) < schedule.buffer:
                _, client, start = heapq.heappop(training)
                if schedule.max_staleness is not None and version - start > schedule.max_staleness:
                    dropped.append((client, start))
                else:
                    buffer[client] = start
        order = tuple(sorted(buffer))
        starts = tuple(buffer[client] for client in order)
        now += server_seconds
        in_order = tuple(sorted(starting))
        yield Update(order, starts, in_order, tuple(dropped), now, len(training))
        version += 1


def _drawn(count: int, clients: int, busy: set[ClientIndex], rng: np.random.Generator) -> list[ClientIndex]:
    """Return at most `count` of the clients that are not busy, in ascending order."""
    idle = clients - len(busy)
    places = list(range(idle))
    if count < idle:
        places = sorted(rng.choice(idle, count, replace=False).tolist())
    drawn = []
    for place in places:
        for taken in sorted(busy):  # the number of the place among all clients
            place += taken <= place
        drawn.append(ClientIndex(place))
    return drawn
