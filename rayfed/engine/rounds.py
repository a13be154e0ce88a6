"""Whose replies count in a round, and with which weight: a cohort that the server waits for, or a buffer of replies.

`rayfed.engine.cohorts` draws the clients.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from rayfed.algorithm import Context, Exchange, State
from rayfed.core.errors import BadHook
from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.round_record import Record
from rayfed.core.trees import is_counter
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.cohorts import Cohorts, Losses
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.fleet import ExchangeRequest, ExchangeResult, Fleet, States
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
        staleness: For each of `clients`, the updates of the server since it started.
        sampled: The number of clients that might have replied.
        began, ended: The times on the clock; None without one.
        waiting: The number of clients that still train when the round ends; None in synchronous rounds.
    """

    clients: tuple[ClientIndex, ...]
    starting: tuple[ClientIndex, ...]
    staleness: tuple[int, ...]
    sampled: int
    began: float | None = None
    ended: float | None = None
    waiting: int | None = None

    @classmethod
    def of(cls, clients: Sequence[ClientIndex], sampled: int | None = None) -> "Turn":
        """Return the turn of clients that all start now."""
        now = tuple(clients)
        if sampled is None:
            sampled = len(now)
        return cls(clients=now, starting=now, staleness=(0,) * len(now), sampled=sampled)

    def add_to(self, record: Record) -> None:
        """Write what a record of the round says about its clients and about the clock."""
        record.sampled = self.sampled
        record.clock_seconds = self.ended
        record.waiting = self.waiting
        if self.began is not None and self.ended is not None:
            record.simulated_seconds = self.ended - self.began
        if self.waiting is not None:
            record.staleness_mean = sum(self.staleness) / len(self.staleness)
            record.staleness_max = max(self.staleness)


class Version(NamedTuple):
    """A version of what the server sends: to all clients that start from it, and further fields of single clients."""

    down: State
    unicast: States


class Rounds:
    """Rounds in which the server waits for its cohort, until the deadline if there is one.

    Args:
        losses: Asks clients for their losses, for the sampler.

    Attributes:
        ring: The versions from which clients under way have started, by the number of updates that made them. With
            them, a checkpoint can go on.
    """

    def __init__(self, blueprint: Blueprint, population: Population, fleet: Fleet, losses: Losses):
        self._blueprint = blueprint
        self._fleet = fleet
        self.ring = dict[int, Version]()
        self._cohorts = Cohorts(blueprint, population, blueprint.training_examples(population), losses)
        self.weights = self._cohorts.weights
        self.update = self._cohorts.update
        self._durations: Durations | None = None
        if blueprint.clock.runs:
            self._durations = Durations(blueprint, population)
        self._now = 0.0

    def sample(self, number: int) -> tuple[ClientIndex, ...]:
        """Return the clients that are sampled for a round, in ascending order."""
        return self._cohorts.draw(number)

    def turn(self, number: int) -> Turn:
        """Return the sampled clients of the next round that reply in time; at least the fastest client does.

        The server notices at once that a client has dropped out, and waits for the other clients until the deadline.
        """
        sampled = self.sample(number)
        began = self._now
        blueprint = self._blueprint
        ends = dict.fromkeys(sampled, began)
        if self._durations is not None:
            ends = {client: self._durations.end(client, number, sampled, began) for client in sampled}
        if blueprint.availability.deadline is None:
            limit = math.inf
        else:
            limit = began + blueprint.availability.deadline
        drops_out = partial(blueprint.availability.drops_out, blueprint.seed, number)
        there = [client for client in sampled if not drops_out(client)]
        in_time = [client for client in there if ends[client] <= limit]
        replying = in_time
        if not replying:
            replying = [min(there or sampled, key=lambda client: ends[client])]
        count = len(sampled)
        if self._cohorts.is_empty:
            count = 0
        turn = Turn.of(replying, count)
        if self._durations is None:
            return turn
        late = in_time and len(in_time) < len(there)
        end = max(ends[client] for client in replying)
        if late:
            end = limit
        self._now = end + blueprint.clock.server_seconds
        return replace(turn, began=began, ended=self._now)

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        """Return the replies of the clients of `request`."""
        return self._fleet.exchange(request, down, unicast)

    def in_mean(self, ctx: Context, weights: Weights) -> Weights:
        """Return the weights that replies have in the mean, given those of their clients."""
        return weights

    def total(
        self, exchange: Exchange, ctx: Context, result: ExchangeResult, down: State, weights: Weights
    ) -> ExactSum:
        """Return the weighted mean of the averaged fields of an exchange; `weights` are those of `in_mean`.

        Where a sampler has given weights that sum to W and not to 1, the mean is Σ w_i y_i + (1 - W) x: the server's
        own x, which it has sent, takes the rest. Statistics that are not trained, such as those of batch norm, are
        divided by W.
        """
        total = result.total
        if exchange.server_side_weighting:
            total = self._fleet.weigh(weights)
        if ctx.stage == "round" and self._cohorts.is_empty and total.value is not None:
            return completed(total, [down], _as_sent)
        if ctx.stage != "round" or not self._cohorts.has_factors or total.value is None:
            return total
        weight = math.fsum(weights.values())
        buffers = ctx.task.untrained

        def rule(value: Tensor, sent: Sequence[Any], name: str) -> Any:
            if name in buffers:
                return value / weight
            if sent[0] is None:
                where = f"sampling: {name!r} is averaged and was not sent to the clients"
                raise BadHook(f"{where}; use sampling.name=uniform")
            return value + (1 - weight) * sent[0].to(value)

        return completed(total, [down], rule)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the ring, as JSON."""
        state = self._cohorts.state()
        if state is None:
            sampling = {}
        else:
            sampling = {"sampling": state}
        return {"clock": self._now, **sampling}

    def restore(self, state: Mapping[str, Any], round: int) -> None:
        """Go on after a round, from what `state` returned."""
        self._now = state.get("clock", 0.0)
        if "sampling" in state:
            self._cohorts.restore(state["sampling"])


class BufferedRounds(Rounds):
    """Rounds that are updates of the server by the timetable of an asynchronous simulation.

    All clients whose start version exists and whose reply is needed train at once, ahead of the clock. Their replies
    and next states wait until their update. Where trained models are scored, only the clients of one update do, because
    what is measured depends on the round.
    """

    def __init__(
        self, blueprint: Blueprint, population: Population, fleet: Fleet, losses: Losses, evaluation: Evaluation
    ):
        super().__init__(blueprint, population, fleet, losses)
        assert blueprint.buffered is not None, "the rounds are asynchronous"
        self._schedule = schedule = blueprint.buffered
        measured = any(isinstance(metric, OfTraining) for metric in evaluation.metrics.values())
        self._ahead = not measured and "trained" not in evaluation.points
        assert self._durations is not None, "asynchronous rounds have a clock"
        clients = population.participants
        end = self._durations.end
        seconds = blueprint.clock.server_seconds
        table = timetable(schedule, len(clients), end, seed=blueprint.seed, server_seconds=seconds)
        self.updates: list[Update] = list(itertools.islice(table, blueprint.rounds))
        self._needed = set[tuple[ClientIndex, int]]()
        for update in self.updates:
            self._needed.update(update.replies)
        self._id = population.clients.id
        self._under_way: dict[int, set[ClientIndex]] = {}  # by the version that they started from
        self._waiting: dict[ClientIndex, ExchangeResult] = {}  # what is left of clients that trained ahead

    def sample(self, number: int) -> tuple[ClientIndex, ...]:
        return self.updates[number - 1].clients

    def turn(self, number: int) -> Turn:
        update = self.updates[number - 1]
        began = 0.0
        if number > 1:
            began = self.updates[number - 2].seconds
        return Turn(
            clients=update.clients,
            starting=update.starting,
            staleness=tuple(number - 1 - start for start in update.starts),
            sampled=len(update.clients) + len(update.dropped),
            began=began,
            ended=update.seconds,
            waiting=update.under_way,
        )

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        version = request.moment.round - 1
        update = self.updates[request.moment.round - 1]
        if update.starting:
            self.ring[version] = Version(down, unicast)
            self._under_way[version] = set(update.starting)
        self._leave(update.dropped)
        result = ExchangeResult()
        if any(client not in self._waiting for client in update.clients):
            only = None
            if not self._ahead:
                only = update.clients
            result = self._train(request, only)
        for client in update.clients:
            result.add(self._waiting.pop(client))
        return result

    def _train(self, request: ExchangeRequest, only: Sequence[ClientIndex] | None) -> ExchangeResult:
        """Train the clients under way that are needed and have not trained yet, or `only` these.

        Returns:
            What the training cost; the rest is put into `_waiting`.
        """
        origins = {}
        versions: dict[int, State] = {}
        unicast = {}
        for start in sorted(self._under_way):
            for client in sorted(self._under_way[start]):
                if only is not None and client not in only:
                    continue
                if (client, start) not in self._needed or client in self._waiting:
                    continue
                version = self.ring[start]
                versions[start + 1] = version.down
                if client in version.unicast:
                    unicast[client] = version.unicast[client]
                origins[client] = (Moment("round", start + 1), self.updates[start].starting)
        clients = tuple(origins)
        weights = dict.fromkeys(clients, 0.0)
        request = replace(request, cohort=clients, clients=clients, weights=weights, origins=origins)
        result = self._fleet.exchange(request, versions, unicast)
        for reply in result.replies:
            client = reply.client
            training = [score for score in result.training if score.client == self._id(client)]
            sent = {client: result.sent[client]}
            self._waiting[client] = ExchangeResult(replies=[reply], training=training, sent=sent)
        return replace(result, replies=[], training=[], sent={})

    def in_mean(self, ctx: Context, weights: Weights) -> Weights:
        replies = self.updates[ctx.round - 1].replies
        own = {}
        for i, start in replies:
            staleness = ctx.round - 1 - start
            own[i] = weights[i] * self._schedule.weight(staleness)
        return own

    def total(
        self, exchange: Exchange, ctx: Context, result: ExchangeResult, down: State, weights: Weights
    ) -> ExactSum:
        """Return the server's next averaged fields; `weights` are those of `in_mean`, and sum to W.

        With x the fields that the server sends now, y_i the reply of client i, and x_i the version that it started
        from, they are Σ w_i y_i + (1 - W) x where the schedule adds models, and x + Σ w_i (y_i - x_i) where it adds
        changes. `missing` has the factor of each version in these sums. Of statistics that are not trained there are no
        changes: they are always taken as in the first form.
        """
        update = self.updates[ctx.round - 1]
        version = ctx.round - 1
        total = self._fleet.weigh(weights)
        weight = math.fsum(weights.values())
        buffers = ctx.task.untrained
        self._fleet.commit(update.clients)
        missing = {version: 1 - weight}  # the factors of versions that are added to the sum
        if not self._schedule.adds_models:
            missing = {}
            for s in {*update.starts}:
                of_version = [weights[i] for i, start in update.replies if start == s]
                missing[s] = -math.fsum(of_version)
            missing[version] = 1 + missing.get(version, 0.0)
        factors = {}
        for start, factor in sorted(missing.items()):
            if abs(factor) > _ROUNDING:
                factors[start] = factor
        sent = [down]
        for start in factors:
            if start == version:
                sent.append(down)
            else:
                sent.append(self.ring[start].down)
        self._leave(update.replies)

        def rule(value: Tensor, versions: Sequence[Any], name: str) -> Any:
            now, *others = versions
            if now is None:  # it was not sent: it is a change already, or a running statistic
                if name in buffers:
                    return value / weight
                return value
            if name in buffers:
                return value + (1 - weight) * now.to(value)
            for factor, other in zip(factors.values(), others, strict=True):
                value = value + factor * other.to(value)
            return value

        if not factors or total.value is None:
            return total
        total.equal = total.equal_to(down)
        return completed(total, sent, rule)

    def restore(self, state: Mapping[str, Any], round: int) -> None:
        self._under_way = {}
        for start, update in enumerate(self.updates[:round]):
            if update.starting:
                self._under_way[start] = set(update.starting)
        for update in self.updates[:round]:
            self._leave((*update.replies, *update.dropped))

    def _leave(self, jobs: Sequence[tuple[ClientIndex, int]]) -> None:
        """Note that clients that started from a version are no longer under way."""
        for client, start in jobs:
            self._under_way[start].discard(client)
            if not self._under_way[start]:
                self.ring.pop(start, None)
                del self._under_way[start]


def _as_sent(value: Tensor, sent: Sequence[Any], name: str) -> Tensor:
    """Return the leaf that the server has sent, where there is one: what an empty round leaves as it was."""
    if sent[0] is None:
        return value
    unchanged: Tensor = sent[0].to(value)
    return unchanged


def _as_mapping(tree: Any) -> Mapping[str, Any]:
    """Return a tree whose leaves have names; one without names has no leaf that is known."""
    if isinstance(tree, Mapping):
        return tree
    return {}


def completed(total: ExactSum, trees: Sequence[Any], rule: Callable[[Tensor, Sequence[Any], str], Tensor]) -> ExactSum:
    """Return a sum of averaged fields with every tensor completed from `trees`, payloads that the server has sent.

    `rule(value, sent, name)` returns the completed value of a leaf, given the leaf of each of `trees`, None where there
    is none of this shape. Counters keep their maximum.
    """

    def walk(value: Any, sent: Sequence[Any], name: str) -> Any:
        if isinstance(value, Mapping):
            below = [_as_mapping(tree) for tree in sent]
            walked = {}
            for key, one in value.items():
                walked[key] = walk(one, [tree.get(key) for tree in below], key)
            return walked
        if is_counter(value):
            return value
        alike: list[Tensor | None] = []
        for tree in sent:
            if isinstance(tree, Tensor) and tree.shape == value.shape:
                alike.append(tree)
            else:
                alike.append(None)
        return rule(value, alike, name)

    value = walk(total.value, trees, "")
    return ExactSum(value, total.dtypes, equal=total.equal)
