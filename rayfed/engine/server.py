"""The server: holds the server state and runs the rounds. This is the whole of federated learning, on one page."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rayfed.algorithm import Context, Replies, Reply, State
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.fleet import Fleet
from rayfed.engine.payload import bytes_by_field, fingerprint
from rayfed.engine.purity import untouched
from rayfed.engine.scoring import Score
from rayfed.engine.seeds import generator, seed_torch
from rayfed.engine.sums import ExactSum
from rayfed.errors import Diverged, UsageError
from rayfed.tree import tensors


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and what to score: every how many rounds, at which points, on which splits, after how much adaptation."""

    every: int = 1
    initial: bool = False
    points: tuple[str, ...] = ("global",)
    splits: tuple[str, ...] = ("val", "test")
    adapt_epochs: int = 1

    def due(self, round: int, rounds: int) -> bool:
        return round % self.every == 0 or round == rounds


@dataclass
class Record:
    """What one round left: its scores, its seconds by part, and the bytes of every field down and up."""

    stage: str
    round: int
    cohort: int
    scores: list[Score] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("broadcast", "train", "upload", "aggregate", "evaluate", "total"), 0.0)
    )
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    epsilon: float | None = None  # of differential privacy, spent so far


class Server:
    """One simulation, under way. Iterate over `run()`; each item is a round that is over.

    Args:
        fleet: the hosts with the clients.
        device: where the server state lives and where `aggregate` computes.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        fleet: Fleet,
        evaluation: Evaluation,
        device: str | torch.device = "cpu",
    ):
        self.blueprint, self.algorithm, self.fleet, self.evaluation = blueprint, blueprint.algorithm, fleet, evaluation
        self.seed = blueprint.seed
        self.ctx: Context = blueprint.context(population, device)
        self.everyone = tuple(range(len(population.clients)))
        self.examples = [len(client.train) for client in population.clients]
        self.domains = [client.domain for client in population.clients]
        self.round = 0  # the last round that is over
        seed_torch(self.seed, "init")
        self.state: State = self.algorithm.init(self.ctx)

    def run(self) -> Iterator[Record]:
        """The remaining rounds: the setup (round 0), rounds 1 to `rounds`, and the final stage (`rounds` + 1)."""
        rounds, setup, final = self.blueprint.rounds, self.algorithm.setup_exchanges, self.algorithm.final_exchanges
        if self.round == 0 and (setup or self.evaluation.initial):
            record = self._exchanges("setup", 0, self.everyone, range(setup))
            yield self._evaluated(record) if self.evaluation.initial else record
        for number in range(self.round + 1, rounds + 1):
            record = self._exchanges("round", number, self.sample(number), range(self.algorithm.trips))
            if self.evaluation.due(number, rounds):
                self._evaluated(record)
            self.round = number
            yield record
        if final and self.round == rounds:
            record = self._evaluated(self._exchanges("final", rounds + 1, self.everyone, range(final)))
            self.round = rounds + 1
            yield record

    def sample(self, round: int) -> tuple[int, ...]:
        """The cohort of a round: `cohort` clients drawn uniformly without replacement, in ascending order.

        An algorithm that takes turns draws without replacement across rounds: nobody comes twice in ⌊N / cohort⌋ rounds
        (of which the clients that are left over sit out).
        """
        cohort = self.blueprint.cohort
        if cohort == len(self.everyone):
            return self.everyone
        if self.algorithm.takes_turns:
            cycle, turn = divmod(round - 1, len(self.everyone) // cohort)
            order = generator(self.seed, "turns", cycle).permutation(len(self.everyone))
            return tuple(sorted(order[turn * cohort : (turn + 1) * cohort].tolist()))
        rng = generator(self.seed, "cohort", round)
        return tuple(sorted(rng.choice(len(self.everyone), cohort, replace=False).tolist()))

    def fingerprint(self) -> str:
        """A hash of the server's state and of every client's: equal for bit-identical outcomes."""
        return fingerprint({"server": self.state, "clients": dict(sorted(self.fleet.save().items()))})

    def _exchanges(self, stage: str, round: int, cohort: tuple[int, ...], trips: Sequence[int]) -> Record:
        began = time.perf_counter()
        record = Record(stage, round, len(cohort))
        for trip in trips:
            last = trip == trips[-1]
            self._exchange(self.ctx.at(stage=stage, round=round, trip=trip, cohort=cohort), record, last)
        now = self.ctx.at(stage=stage, round=round, cohort=cohort)
        record.epsilon = self.algorithm.privacy_spent(now, self.state)
        record.seconds["total"] = time.perf_counter() - began
        return record

    def _exchange(self, ctx: Context, record: Record, last: bool) -> None:
        """Broadcast, train, average, aggregate."""
        times = [time.perf_counter()]
        now = {"stage": ctx.stage, "round": ctx.round, "trip": ctx.trip, "cohort": ctx.cohort}
        with untouched(f"{type(self.algorithm).__name__}.broadcast", server=self.state):
            seed_torch(self.seed, "broadcast", *now.values())
            down = self.algorithm.broadcast(ctx, self.state)
            own = {i: self.algorithm.unicast(ctx.at(client=i), self.state) for i in ctx.cohort}
        early = {i: self.algorithm.weight(ctx.at(client=i), self.examples[i]) for i in ctx.cohort}
        total = math.fsum(early.values())
        weights = {i: weight / total for i, weight in early.items()} if total else early
        times.append(time.perf_counter())

        due = last and ctx.stage == "round" and self.evaluation.due(ctx.round, self.blueprint.rounds)
        score_trained = self.evaluation.splits if due and "trained" in self.evaluation.points else ()
        own = {i: fields for i, fields in own.items() if fields}
        answers = self.fleet.exchange(ctx.cohort, down, own, weights, now, score_trained)
        times.append(time.perf_counter())

        replies = sorted((reply for answer in answers for reply in answer.replies), key=lambda reply: reply.client)
        sums = [answer.total for answer in answers]
        if self.algorithm.weighs_replies:
            found = self.algorithm.weights(ctx, self.state, replies)
            sums = self.fleet.weigh({r.client: float(w) for r, w in zip(replies, found, strict=True)})
        with untouched(f"{type(self.algorithm).__name__}.aggregate", server=self.state):
            seed_torch(self.seed, "aggregate", *now.values())
            self.state = self.algorithm.aggregate(ctx, self.state, Replies(self._mean(ctx, sums), replies))
        self._finite(ctx)
        times.append(time.perf_counter())

        self._note(record, times, answers, down, own, replies)

    def _mean(self, ctx: Context, sums: Sequence[ExactSum]) -> Any:
        whole = ExactSum()
        for part in sums:
            whole.merge(part)
        return {} if whole.value is None else ctx.task.layout(whole.result())

    def _finite(self, ctx: Context) -> None:
        for path, tensor in tensors(self.state):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise Diverged(f"round {ctx.round}, server: {path} is no longer finite")

    def _note(
        self, record: Record, times: list[float], answers: Any, down: State, own: dict[int, State], replies: list[Reply]
    ) -> None:
        train = max((answer.seconds for answer in answers), default=0.0)
        broadcast, called, aggregated = (b - a for a, b in itertools.pairwise(times))
        parts = {"broadcast": broadcast, "train": train, "upload": called - train, "aggregate": aggregated}
        for name, seconds in parts.items():
            record.seconds[name] += seconds
        for name, size in bytes_by_field(down).items():
            record.bytes_down[name] = record.bytes_down.get(name, 0) + size * len(replies)
        for fields in own.values():
            for name, size in bytes_by_field(fields).items():
                record.bytes_down[name] = record.bytes_down.get(name, 0) + size
        record.scores = []  # of a round with several exchanges, the last one's training counts
        for answer in answers:
            for name, size in answer.bytes_up.items():
                record.bytes_up[name] = record.bytes_up.get(name, 0) + size
            record.scores += answer.scores
            record.scores += [
                Score(client, self.domains[client], "train", "trained", name, value, n)
                for client, name, value, n in answer.metrics
            ]

    def _evaluated(self, record: Record) -> Record:
        """Adds the scores of the state as it is now: aggregated, and downloaded by every client."""
        began = time.perf_counter()
        ctx = self.ctx.at(stage="round", round=record.round, cohort=self.everyone)
        now = {"stage": "round", "round": record.round, "trip": 0, "cohort": self.everyone}
        points, splits = self.evaluation.points, self.evaluation.splits
        scores: list[Score] = []
        seed_torch(self.seed, "evaluate", record.round)
        if "global" in points:
            model = self.algorithm.global_model(ctx, self.state)
            if model is None:
                raise UsageError("evaluate.points=[global]: parts of the model stay with the clients; use downloaded")
            scores += self.fleet.score_global(self.everyone, model, now, splits)
        if {"downloaded", "adapted"} & set(points):
            down = self.algorithm.broadcast(ctx, self.state)
            own = {i: self.algorithm.unicast(ctx.at(client=i), self.state) for i in self.everyone}
            own = {i: fields for i, fields in own.items() if fields}
            epochs = self.evaluation.adapt_epochs
            scores += self.fleet.score_downloads(self.everyone, down, own, now, points, splits, epochs)
        record.scores += sorted(scores, key=lambda s: (s.point, s.client, s.split, s.domain, s.metric))
        record.seconds["evaluate"] += time.perf_counter() - began
        record.seconds["total"] += record.seconds["evaluate"]
        return record
