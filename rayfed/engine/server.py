"""The server: holds the server state and runs the rounds. This is the whole of federated learning, on one page."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rayfed.algorithm import Context, Replies, Reply, State
from rayfed.core.errors import BadHook, Diverged
from rayfed.core.records import Record, Score
from rayfed.core.rng import generator, seed_torch
from rayfed.core.trees import tensors
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation, Evaluator, sent
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.fleet import Fleet
from rayfed.engine.host_data import Scored
from rayfed.engine.metric_collection import NO_METRICS, DueMetrics
from rayfed.engine.purity import untouched
from rayfed.engine.scoring import ScoredPart
from rayfed.engine.serialization import bytes_by_field, bytes_by_formula, fingerprint
from rayfed.metrics.base import OfTraining, Value


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
        self.evaluator = Evaluator(evaluation, self.algorithm, self.ctx, fleet, population, self.seed)
        self.everyone = self.evaluator.everyone
        self.examples = [len(client.train) for client in population.clients]
        self.round = 0  # the last round that is over
        seed_torch(self.seed, "init")
        self.state: State = self.algorithm.init(self.ctx)

    def run(self) -> Iterator[Record]:
        """The remaining rounds: the setup (round 0), rounds 1 to `rounds`, and the final stage (`rounds` + 1)."""
        rounds, setup, final = self.blueprint.rounds, self.algorithm.setup_exchanges, self.algorithm.final_exchanges
        if self.round == 0 and (setup or self.evaluation.initial):
            record = self._exchanges("setup", 0, self.everyone, range(setup))
            yield self._evaluated(record, self.everyone) if self.evaluation.initial else record
        for number in range(self.round + 1, rounds + 1):
            cohort = self.sample(number)
            record = self._exchanges("round", number, cohort, range(self.algorithm.trips))
            if self.evaluation.due(number, rounds):
                self._evaluated(record, cohort, over=number == rounds and not final)
            self.round = number
            yield record
        if final and self.round == rounds:
            record = self._exchanges("final", rounds + 1, self.everyone, range(final))
            self._evaluated(record, self.everyone, over=True)
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
        if self.algorithm.sample_without_replacement:
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
        record = Record(stage=stage, round=round, cohort=len(cohort))
        for trip in trips:
            last = trip == trips[-1]
            self._exchange(self.ctx.at(stage=stage, round=round, trip=trip, cohort=cohort), record, last)
        now = self.ctx.at(stage=stage, round=round, cohort=cohort)
        if (spent := self.algorithm.privacy_spent(now, self.state)) is not None:
            record.epsilon, record.privacy_unit = spent
        if stage == "round":
            record.bytes_formula = bytes_by_formula(self.algorithm, now, [self.examples[i] for i in cohort])
            record.scores += self._watched(cohort)
        record.seconds["total"] = time.perf_counter() - began
        return record

    def _watched(self, cohort: tuple[int, ...]) -> list[Score]:
        n = sum(self.examples[i] for i in cohort)
        logged = [name for name in self.algorithm.logged_scalars if name in self.state]
        server = ScoredPart(split="train", point="global")
        return [server.score(Value(name, float(self.state[name]), n)) for name in logged]

    def _exchange(self, ctx: Context, record: Record, last: bool) -> None:
        """Broadcast, train, average, aggregate."""
        times = [time.perf_counter()]
        now = {"stage": ctx.stage, "round": ctx.round, "trip": ctx.trip, "cohort": ctx.cohort}
        with untouched(f"{type(self.algorithm).__name__}.broadcast", server=self.state):
            seed_torch(self.seed, "broadcast", *now.values())
            down, own = sent(self.algorithm, ctx, self.state)
        early = {i: self.algorithm.weight(ctx.at(client=i), self.examples[i]) for i in ctx.cohort}
        total = math.fsum(early.values())
        weights = {i: weight / total for i, weight in early.items()} if total else early
        times.append(time.perf_counter())

        due = last and ctx.stage == "round" and self.evaluation.due(ctx.round, self.blueprint.rounds)
        score_trained = self.evaluation.splits if due and "trained" in self.evaluation.points else ()
        measures = self._measures(ctx, last, due)
        answers = self.fleet.exchange(ctx.cohort, down, own, weights, now, score_trained, measures)
        times.append(time.perf_counter())

        replies = sorted((reply for answer in answers for reply in answer.replies), key=lambda reply: reply.client)
        sums = [answer.total for answer in answers]
        if self.algorithm.server_side_weighting:
            found = self.algorithm.weights(ctx, self.state, replies)
            sums = self.fleet.weigh({r.client: float(w) for r, w in zip(replies, found, strict=True)})
        with untouched(f"{type(self.algorithm).__name__}.aggregate", server=self.state):
            seed_torch(self.seed, "aggregate", *now.values())
            self.state = self._aggregated(ctx, Replies(self._mean(ctx, sums), replies))
        self._finite(ctx)
        times.append(time.perf_counter())

        self._note(record, times, answers, down, own, replies)
        began = time.perf_counter()
        scored = Scored.together([Scored(answer.scores, answer.collected) for answer in answers])
        scores, maps = self.evaluator.completed(scored, measures, ctx.round)
        record.scores, record.maps = [*scores, *record.scores], maps
        record.seconds["evaluate"] += time.perf_counter() - began

    def _aggregated(self, ctx: Context, replies: Replies) -> State:
        name = type(self.algorithm).__name__
        try:
            state = self.algorithm.aggregate(ctx, self.state, replies)
        except KeyError as error:
            field = error.args[0] if error.args else None
            if field not in self.algorithm.averaged or field in replies.mean:
                raise
            raise BadHook(f"{name}.aggregate: no client sent {field!r}, which is in averaged; finish must") from error
        if not isinstance(state, dict):
            raise BadHook(f"{name}.aggregate returned {type(state).__name__}, not the server's next state, a dict")
        return state

    def _measures(self, ctx: Context, last: bool, scored: bool) -> DueMetrics:
        """The metrics to take in this exchange: those of training need no scored models, the others do."""
        if ctx.stage != "round":
            return NO_METRICS
        due = self.evaluator.measures(ctx.round, ctx.cohort, ctx.rounds)  # nobody trains for scores in a final stage
        return due if scored and last else replace(due.only(OfTraining), last=last)

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
        called_for = max((answer.seconds for answer in answers), default=0.0)
        train = max((answer.seconds - answer.seconds_scoring for answer in answers), default=0.0)
        broadcast, called, aggregated = (b - a for a, b in itertools.pairwise(times))
        parts = {"broadcast": broadcast, "train": train, "upload": called - called_for, "aggregate": aggregated}
        parts["evaluate"] = called_for - train  # of the trained models
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
            record.scores += answer.metrics

    def _evaluated(self, record: Record, cohort: Sequence[int], *, over: bool = False) -> Record:
        """Adds the scores of the state as it is now, and those of the unseen clients where training is `over`."""
        began = time.perf_counter()
        scores, maps = self.evaluator.evaluated(self.state, record.round, cohort)
        record.scores += scores
        record.maps += maps
        if over:
            record.scores += self.evaluator.unseen_scores(self.state)
        seconds = time.perf_counter() - began
        record.seconds["evaluate"] += seconds
        record.seconds["total"] += seconds
        return record
