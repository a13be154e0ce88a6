"""The two ways in which the server gets its rounds: from a cohort that it waits for, or from a buffer of replies."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rayfed.algorithm import Context, Exchange, Reply, State
from rayfed.core.errors import BadHook
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.records import Record, Score
from rayfed.core.round_schedule import Buffered
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.cohorts import Cohorts, Losses, completed, normalised_weights
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.fleet import Fleet
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Origin, States
from rayfed.engine.timetable import Durations, Update, timetable
from rayfed.metrics.base import OfTraining

Weights = Mapping[ClientIndex, float]
_ROUNDING = 1e-12  # of weights that sum to 1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The clients of a round.

    Attributes:
        clients: The clients whose replies count, in ascending order.
        starting: The clients that start from the server's present state, in ascending order.
        sampled: The number of clients that might have replied.
        staleness: For each client, the updates of the server since it started.
        began, ended: The times on the clock; None without one.
        waiting: The number of clients that still train when the round ends; None in synchronous rounds.
    """

    clients: tuple[ClientIndex, ...]
    starting: tuple[ClientIndex, ...]
    sampled: int
    staleness: tuple[int, ...]
    began: float | None = None
    ended: float | None = None
    waiting: int | None = None

    def add_to(self, record: Record) -> None:
        """Write what a record of the round says about its clients and about the clock."""
        record.sampled, record.clock_seconds, record.waiting = self.sampled, self.ended, self.waiting
        if self.began is not None and self.ended is not None:
            record.simulated_seconds = self.ended - self.began
        if self.waiting is not None:
            record.staleness_mean = sum(self.staleness) / len(self.staleness)
            record.staleness_max = max(self.staleness)


class Version(NamedTuple):
    """A version of what the server sends: to all clients that start from it, and further fields of single clients."""

    down: State
    unicast: States


class Rounds(Protocol):
    """What the server asks of its schedule.

    Attributes:
        ring: The versions from which clients under way have started, by the number of updates that made them. With
            them, a checkpoint can go on.
    """

    ring: dict[int, Version]

    def sample(self, number: int) -> tuple[ClientIndex, ...]:
        """Return the clients that are sampled for a round, in ascending order."""
        ...

    def turn(self, number: int) -> Turn:
        """Return the clients of the next round."""
        ...

    def weights(self, own: Callable[[ClientIndex], float], clients: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
        """Return the weights of a round's clients in the mean, given the method's own weights before normalisation."""
        ...

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        """Return the replies of the clients of `request`, for which `Fleet.exchange` trains them."""
        ...

    def total(
        self, exchange: Exchange, ctx: Context, result: ExchangeResult, down: State, weights: Weights
    ) -> ExactSum:
        """Return the weighted mean of the averaged fields of an exchange."""
        ...

    def update(self, record: Record, cohort: Sequence[ClientIndex]) -> None:
        """Note what the clients of a round have reported."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the ring, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any], round: int) -> None:
        """Go on after a round, from what `state` returned."""
        ...


def rounds_of(
    blueprint: Blueprint, population: Population, fleet: Fleet, evaluation: Evaluation, losses: Losses
) -> Rounds:
    """Return the schedule of a simulation; `losses` asks clients for their losses."""
    if blueprint.buffered is not None:
        return BufferedRounds(blueprint.buffered, blueprint, population, fleet, evaluation)
    return SynchronousRounds(blueprint, population, fleet, losses)


class SynchronousRounds:
    """Rounds in which the server waits for its cohort, until the deadline if there is one."""

    def __init__(self, blueprint: Blueprint, population: Population, fleet: Fleet, losses: Losses):
        self._blueprint, self._fleet, self.ring = blueprint, fleet, dict[int, Version]()
        self._cohorts = Cohorts(blueprint, population, blueprint.training_examples(population), losses)
        self.sample, self.weights, self.update = self._cohorts.draw, self._cohorts.weights, self._cohorts.update
        self._durations = Durations(blueprint, population) if blueprint.clock.runs else None
        self._now = 0.0

    def turn(self, number: int) -> Turn:
        """Return the sampled clients that reply in time; at least the fastest client does.

        The server notices at once that a client has dropped out, and waits for the other clients until the deadline.
        """
        sampled, began, how = self.sample(number), self._now, self._blueprint
        ends = dict.fromkeys(sampled, began)
        if self._durations is not None:
            ends = {client: self._durations.end(client, number, sampled, began) for client in sampled}
        limit = math.inf if how.availability.deadline is None else began + how.availability.deadline
        there = [client for client in sampled if not how.availability.drops_out(how.seed, number, client)]
        in_time = [client for client in there if ends[client] <= limit]
        replying = tuple(in_time or [min(there or sampled, key=lambda client: ends[client])])
        late = in_time and len(in_time) < len(there)
        turn = Turn(clients=replying, starting=replying, sampled=len(sampled), staleness=(0,) * len(replying))
        if self._durations is None:
            return turn
        self._now = (limit if late else max(ends[client] for client in replying)) + how.clock.server_seconds
        return replace(turn, began=began, ended=self._now)

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        return self._fleet.exchange(request, down, unicast)

    def total(
        self, exchange: Exchange, ctx: Context, result: ExchangeResult, down: State, weights: Weights
    ) -> ExactSum:
        total = self._fleet.weigh(weights) if exchange.server_side_weighting else result.total
        if ctx.stage != "round" or not self._cohorts.has_factors or total.value is None:
            return total
        weight, buffers = math.fsum(weights.values()), ctx.task.untrained

        def rule(value: Tensor, sent: Sequence[Any], name: str) -> Tensor:
            if name in buffers:
                return value / weight
            if sent[0] is None:
                raise BadHook(
                    f"sampling: {name!r} is averaged and was not sent to the clients; use sampling.name=uniform"
                )
            mixed: Tensor = value + (1 - weight) * sent[0].to(value)
            return mixed

        return completed(total, [down], rule)

    def state(self) -> dict[str, Any]:
        sampling = {} if (state := self._cohorts.state()) is None else {"sampling": state}
        return {"clock": self._now, **sampling}

    def restore(self, state: Mapping[str, Any], round: int) -> None:
        self._now = state.get("clock", 0.0)
        if "sampling" in state:
            self._cohorts.restore(state["sampling"])


class BufferedRounds:
    """Rounds that are updates of the timetable.

    All clients whose start version exists and whose reply is needed train at once, ahead of the clock. Their replies
    and next states wait until their update. Where trained models are scored, only the clients of one update do, because
    what is measured depends on the round.
    """

    def __init__(
        self,
        schedule: Buffered,
        blueprint: Blueprint,
        population: Population,
        fleet: Fleet,
        evaluation: Evaluation,
    ):
        self._schedule, self._fleet, self._population = schedule, fleet, population
        measured = any(isinstance(metric, OfTraining) for metric in evaluation.metrics.values())
        self._ahead = not measured and "trained" not in evaluation.points
        clients, seconds = len(population.participants), blueprint.clock.server_seconds
        end = Durations(blueprint, population).end
        table = timetable(schedule, clients, end, seed=blueprint.seed, server_seconds=seconds)
        self.updates: list[Update] = list(itertools.islice(table, blueprint.rounds))
        self._needed = {job for update in self.updates for job in zip(update.clients, update.starts, strict=True)}
        self.ring: dict[int, Version] = {}
        self._under_way: dict[int, set[ClientIndex]] = {}  # by the version that they started from
        self._waiting: dict[ClientIndex, _Waiting] = {}

    def sample(self, number: int) -> tuple[ClientIndex, ...]:
        return self.updates[number - 1].clients

    def turn(self, number: int) -> Turn:
        update = self.updates[number - 1]
        return Turn(
            clients=update.clients,
            starting=update.starting,
            sampled=len(update.clients) + len(update.dropped),
            staleness=tuple(number - 1 - start for start in update.starts),
            began=self.updates[number - 2].seconds if number > 1 else 0.0,
            ended=update.seconds,
            waiting=update.under_way,
        )

    def weights(self, own: Callable[[ClientIndex], float], clients: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
        return normalised_weights(own, clients)

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        version, update = request.moment.round - 1, self.updates[request.moment.round - 1]
        if update.starting:
            self.ring[version], self._under_way[version] = Version(down, unicast), set(update.starting)
        for client, start in update.dropped:
            self._leaves(client, start)
        result = ExchangeResult()
        if any(client not in self._waiting for client in update.clients):
            result = self._train(request, None if self._ahead else update.clients)
        taken = [self._waiting.pop(client) for client in update.clients]
        return replace(
            result,
            replies=[waiting.reply for waiting in taken],
            training=[score for waiting in taken for score in waiting.training],
            sent={waiting.reply.client: waiting.sent for waiting in taken},
        )

    def _train(self, request: ExchangeRequest, only: Sequence[ClientIndex] | None) -> ExchangeResult:
        """Train the clients under way that are needed and have not trained yet, or `only` these."""
        starts = {
            client: start
            for start in sorted(self._under_way)
            for client in sorted(self._under_way[start])
            if (client, start) in self._needed and client not in self._waiting and (only is None or client in only)
        }
        origins = {
            client: Origin(Moment("round", start + 1), self.updates[start].starting) for client, start in starts.items()
        }
        down = {str(start + 1): self.ring[start].down for start in set(starts.values())}
        unicast = {
            client: fields for client, start in starts.items() if (fields := self.ring[start].unicast.get(client))
        }
        clients = tuple(starts)
        request = replace(
            request, cohort=clients, clients=clients, weights=dict.fromkeys(clients, 0.0), origins=origins
        )
        result = self._fleet.exchange(request, down, unicast)
        index = {self._population.clients.id(client): client for client in clients}
        training: dict[ClientIndex, list[Score]] = {client: [] for client in clients}
        for score in result.training:
            training[index[score.client]].append(score)
        for reply in result.replies:
            self._waiting[reply.client] = _Waiting(reply, training[reply.client], result.sent[reply.client])
        return result

    def total(
        self, exchange: Exchange, ctx: Context, result: ExchangeResult, down: State, weights: Weights
    ) -> ExactSum:
        update, version = self.updates[ctx.round - 1], ctx.round - 1
        starts = dict(zip(update.clients, update.starts, strict=True))
        shares = {client: weights[client] * self._schedule.weight(version - start) for client, start in starts.items()}
        total, weight = self._fleet.weigh(shares), math.fsum(shares.values())
        self._fleet.commit(update.clients)
        missing = {version: 1 - weight}
        if not self._schedule.adds_models:
            missing = {start: -math.fsum(shares[i] for i in starts if starts[i] == start) for start in {*update.starts}}
            missing[version] = 1 + missing.get(version, 0.0)
        factors = {start: factor for start, factor in sorted(missing.items()) if abs(factor) > _ROUNDING}
        sent = [down, *(down if start == version else self.ring[start].down for start in factors)]
        for client, start in starts.items():
            self._leaves(client, start)

        buffers = ctx.task.untrained

        def rule(value: Tensor, versions: Sequence[Any], name: str) -> Tensor:
            now, *others = versions
            if now is None:  # it was not sent: it is a change already, or a running statistic
                return value / weight if name in buffers else value
            pairs = [(1 - weight, now)] if name in buffers else zip(factors.values(), others, strict=True)
            for factor, other in pairs:
                value = value + factor * other.to(value)
            return value

        if not factors or total.value is None:
            return total
        total.equal = total.equal_to(down)
        return completed(total, sent, rule)

    def update(self, record: Record, cohort: Sequence[ClientIndex]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any], round: int) -> None:
        self._under_way = {}
        for number, update in enumerate(self.updates[:round]):
            self._under_way[number] = set(update.starting)
            for client, start in (*zip(update.clients, update.starts, strict=True), *update.dropped):
                self._under_way[start].discard(client)
        self._under_way = {start: clients for start, clients in self._under_way.items() if clients}

    def _leaves(self, client: ClientIndex, start: int) -> None:
        """Note that a client is no longer under way."""
        self._under_way[start].discard(client)
        if not self._under_way[start]:
            del self.ring[start], self._under_way[start]


class _Waiting(NamedTuple):
    """What a client that trained ahead of the clock has left, beside its averaged fields and its next state."""

    reply: Reply
    training: list[Score]
    sent: dict[str, int]
