"""Who takes part in a round, and whose replies count: a cohort that the server waits for, or a buffer of replies.

A sampler draws cohorts; it may give the clients weights of its own.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rayfed.algorithm import Context, Exchange, State
from rayfed.core.errors import BadHook
from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.rng import generator
from rayfed.core.round_record import Record
from rayfed.core.trees import is_counter
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation, participants_of
from rayfed.engine.fleet import ExchangeRequest, ExchangeResult, Fleet, States, add_to
from rayfed.engine.timetable import Durations, Update, timetable
from rayfed.metrics.base import OfTraining
from rayfed.sampling.base import WITHOUT_REPLACEMENT, Cohort, Drawing, Uniform

Weights = Mapping[ClientIndex, float]
_ROUNDING = 1e-12  # of weights that sum to 1
_LOSS_BYTES = 4  # a reported loss is a float32

Losses = Callable[[int, Sequence[ClientIndex]], tuple[Mapping[ClientIndex, float], Mapping[str, int]]]
"""losses(round, clients): each client's loss of the model that it would download, and a download's bytes by field."""


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


class Cohorts:
    """Draws the cohorts of a simulation; `losses` asks clients for their losses."""

    def __init__(self, blueprint: Blueprint, population: Population, examples: np.ndarray, losses: Losses):
        self._blueprint = blueprint
        self._losses = losses
        self.participants = participants_of(population)
        self.is_uniform = type(blueprint.sampler) is Uniform
        of_participants = examples[: len(self.participants)]
        sizes = np.maximum(of_participants.astype(float), 1.0)
        self._shares = sizes / sizes.sum()
        self._clients = population.clients
        self._last_losses = np.full(len(self.participants), np.nan)
        self._participated: set[int] = set()
        self._cohort: Cohort | None = None
        self._asked: set[int] = set()  # the clients that evaluated the model for the sampler in this round
        self._sizes: Mapping[str, int] = {}  # the bytes of one download by field
        self._seconds = 0.0  # of the evaluation

    def draw(self, round: int) -> tuple[ClientIndex, ...]:
        """Return the clients of a round, in ascending order."""
        self._cohort = None
        self._asked = set()
        self._seconds = 0.0
        blueprint = self._blueprint
        size = self._blueprint.cohort
        clients = len(self.participants)
        if size == clients:
            return tuple(self.participants)
        rng = generator(blueprint.seed, "cohort", round=round)
        drawing = Drawing(
            round=round,
            size=size,
            shares=self._shares.copy(),
            last_losses=self._last_losses.copy(),
            rng=rng,
            rng_of_cycle=lambda rounds: generator(blueprint.seed, "cohorts", cycle=(round - 1) // rounds),
            losses=partial(self._losses_now, round),
        )
        sampler = blueprint.sampler
        if blueprint.algorithm.traits.sample_without_replacement:
            sampler = WITHOUT_REPLACEMENT
        most = size
        if sampler.varies:
            most = clients
        self._cohort = self._checked(sampler.draw(drawing), most)
        return tuple(map(ClientIndex, self._cohort.clients))

    def weights(self, own: Callable[[ClientIndex], float], cohort: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
        """Return the weights of a cohort in the aggregate, given the method's `own` weights before normalisation."""
        drawn = self._cohort
        if drawn is not None and drawn.stand_in:
            return dict.fromkeys(cohort, 0.0)
        if drawn is not None and drawn.equal:
            return dict.fromkeys(cohort, 1 / len(cohort))
        if drawn is not None and drawn.factors is not None:
            total = math.fsum(map(own, self.participants))
            factors = dict(zip(drawn.clients, drawn.factors, strict=True))
            if not total:
                return dict.fromkeys(cohort, 0.0)
            return {i: factors[i] * own(i) / total for i in cohort}
        return normalised_weights(own, cohort)

    @property
    def has_factors(self) -> bool:
        """Whether the weights of this round need not sum to 1."""
        return self._cohort is not None and self._cohort.factors is not None

    @property
    def is_empty(self) -> bool:
        """Whether nobody was drawn for this round, so that a client stands in whose reply has no weight."""
        return self._cohort is not None and self._cohort.stand_in

    def update(self, record: Record, cohort: Sequence[ClientIndex]) -> None:
        """Note what the clients of a round have reported, and add the cost of sampling to its record."""
        if self.is_uniform:
            return
        self._participated.update(cohort)
        for score in record.scores:
            is_training_loss = (score.metric, score.split, score.point) == ("loss", "train", "trained")
            if is_training_loss and not score.unseen:
                self._last_losses[self._clients.place(score.client)] = score.value
        if not self._asked:
            return
        more = len(self._asked - set(cohort))  # clients of the cohort have downloaded the model already
        sizes = {}
        for name, size in self._sizes.items():
            sizes[name] = size * more
        add_to(record.bytes_down, sizes)
        record.bytes_up["sampling loss"] = _LOSS_BYTES * len(self._asked)
        record.seconds["evaluate"] += self._seconds
        record.seconds["total"] += self._seconds

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps, as JSON; None for uniform sampling, which keeps nothing."""
        if self.is_uniform:
            return None
        losses = {}
        for i, loss in enumerate(self._last_losses):
            if np.isfinite(loss):
                losses[str(i)] = float(loss)
        return {"participated": sorted(self._participated), "last_losses": losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._participated = set(state["participated"])
        self._last_losses[:] = np.nan
        for i, loss in state["last_losses"].items():
            self._last_losses[int(i)] = loss

    def _losses_now(self, round: int, clients: Sequence[int]) -> np.ndarray:
        began = time.perf_counter()
        asked = tuple(sorted(set(map(ClientIndex, clients))))
        losses, self._sizes = self._losses(round, asked)
        self._asked.update(asked)
        self._seconds += time.perf_counter() - began
        return np.array([losses[ClientIndex(i)] for i in clients])

    def _checked(self, cohort: Cohort, size: int) -> Cohort:
        """Return a cohort with its clients in ascending order; raise BadHook if it is not valid."""
        name = f"{type(self._blueprint.sampler).__name__}.draw"
        clients = list(map(int, cohort.clients))
        are_different = len(set(clients)) == len(clients)
        if not 1 <= len(clients) <= size or not are_different:
            raise BadHook(f"{name} returned {len(clients)} clients, expected 1 to {size} different ones")
        for client in sorted(clients):
            if client not in self.participants:
                expected = f"positions from 0 to {len(self.participants) - 1}"
                raise BadHook(f"{name} returned client {client}, expected {expected}")
        order = sorted(range(len(clients)), key=clients.__getitem__)
        factors = cohort.factors
        if factors is not None:
            are_weights = all(math.isfinite(f) and f >= 0 for f in factors)
            if len(factors) != len(clients) or not are_weights:
                raise BadHook(f"{name}: factors must be one finite non-negative number per client")
            factors = [float(factors[position]) for position in order]
        if (factors is not None or cohort.equal) and not self._blueprint.sampler.reweights:
            raise BadHook(f"{name} returned weights; the class must declare reweights = True")
        return Cohort([clients[position] for position in order], factors, cohort.equal, cohort.stand_in)


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
        """Return the weighted mean of the averaged fields of an exchange; `weights` are those of `in_mean`."""
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
    """Rounds that are updates of the timetable.

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


def normalised_weights(own: Callable[[ClientIndex], float], cohort: Sequence[ClientIndex]) -> dict[ClientIndex, float]:
    """Return the `own` weights of a cohort, divided by their sum; all are 0 where they sum to 0."""
    weights = {i: own(i) for i in cohort}
    total = math.fsum(weights.values())
    if total:
        return {i: weight / total for i, weight in weights.items()}
    return weights


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
