"""The server: holds the server state and runs the rounds."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from rayfed.algorithm import Algorithm, Context, Exchange, Replies, State
from rayfed.core.errors import BadHook, Diverged
from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex, Moment, Stage
from rayfed.core.round_record import BestRound, Record, RepresentationMap, Score
from rayfed.core.trees import all_finite, bytes_by_field, named_tensors, outcome_hash
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.cohorts import normalised_weights
from rayfed.engine.device import set_kernels
from rayfed.engine.evaluation import EarlyStopping, Evaluation, Evaluator, downloads
from rayfed.engine.fleet import ExchangeRequest, ExchangeResult, Fleet, Request, States, add_to
from rayfed.engine.purity import untouched
from rayfed.engine.record_steps import StepsOfRecords, note_privacy
from rayfed.engine.rounds import BufferedRounds, Rounds, Turn
from rayfed.engine.scoring import NO_METRICS, DueMetrics, as_score
from rayfed.engine.training import steps_of
from rayfed.metrics.base import OfTraining, Value

_Item = TypeVar("_Item")


class Server:
    """A simulation under way. Iterate over `run()`; each item is a finished round.

    Args:
        fleet: The hosts with the clients.
        device: Where the server's state lives and where `aggregate` computes.

    Attributes:
        state: The server's present state.
        round: The last finished round; the final stage counts as the round after the last one.
        rounds: Says whose replies count in a round.
        best: The round with the best validation score so far.
        early_stopping: Whether and why training has ended before its last round.
        participants: The positions of the clients that take part in training.
        examples: How many examples each client trains on, int64 [clients].
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        fleet: Fleet,
        evaluation: Evaluation,
        device: str | torch.device = "cpu",
    ):
        self.blueprint = blueprint
        self.algorithm = blueprint.algorithm
        self.fleet = fleet
        self.evaluation = evaluation
        self.seed = blueprint.seed
        self._streams = blueprint.streams
        set_kernels(deterministic=blueprint.deterministic, tf32=blueprint.tf32)
        self.ctx: Context = blueprint.context(population, device)
        self.evaluator = Evaluator(evaluation, blueprint, self.ctx, fleet, population)
        self.population = population
        self.participants = self.evaluator.participants
        self.examples = blueprint.training_examples(population)
        self._steps_of_records = StepsOfRecords(blueprint, population, self.examples)
        self.round = 0  # the last finished round
        self._is_set_up = False
        self.early_stopping = EarlyStopping(evaluation.stop_rule)
        self.best = BestRound(evaluation.selection)

        def losses(*at: Any) -> Any:
            return self.evaluator.training_losses(self.state, *at)

        arguments = blueprint, population, fleet, losses
        if blueprint.buffered is None:
            self.rounds = Rounds(*arguments)
        else:
            self.rounds = BufferedRounds(*arguments, evaluation)
        self._models_before: Mapping[ClientIndex, Any] = {}
        self._streams.begin("init")
        self.state: State = self.algorithm.init(self.ctx)

    def run(self) -> Iterator[Record]:
        """Run what is left of the setup (round 0), of rounds 1 to `rounds`, and of the final stage (`rounds` + 1)."""
        for record in self._records():
            record.bytes_to_hosts, record.bytes_from_hosts = self.fleet.take_traffic()
            yield record

    def _records(self) -> Iterator[Record]:
        rounds = self.blueprint.rounds
        final = bool(self.algorithm.final_exchanges)
        everyone = Turn.of(self.participants)
        if not self._is_set_up and (self.algorithm.setup_exchanges or self.evaluation.initial):
            record = self._stage("setup", 0, everyone)
            record.scores = self.evaluator.kept(record.scores)
            record.clock_seconds = None
            if self.blueprint.clock.runs:
                record.clock_seconds = 0.0
            if self.evaluation.initial:  # clients that adapt before they are scored train
                cohort = self.participants[: self.blueprint.cohort]
                first = self.ctx.at(Moment("round", 1), cohort=cohort)
                self._choose_vmap_clients(self.algorithm.round_exchanges[0], first, record)
                record = self._add_scores(record, self.participants)
            yield record
        for number in range(self.round + 1, rounds + 1):
            if self.early_stopping.reason is not None:
                break
            turn = self.rounds.turn(number)
            cohort = turn.clients
            record = self._stage("round", number, turn)
            turn.add_to(record)
            self.rounds.update(record, cohort)
            record.scores = self.evaluator.kept(record.scores)
            if "trained" in self.evaluation.points and "train" in self.evaluation.splits:
                record.scores = _without_reports(record.scores, scored=self.evaluation.due(number, rounds))
            if self.evaluation.due(number, rounds):
                self._add_scores(record, cohort, with_unseen_clients=number == rounds and not final)
                self.early_stopping.update(record)
                if self.early_stopping.reason is not None and number < rounds and not final:
                    self._add_last_scores(record, cohort)
            self.round = number
            yield record
        if final and self.round <= rounds and self._rounds_are_over:
            record = self._stage("final", rounds + 1, everyone)
            record.scores = self.evaluator.kept(record.scores)
            self._add_scores(record, self.participants, with_unseen_clients=True)
            self.round = rounds + 1
            yield record

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to run."""
        if self.algorithm.final_exchanges:
            return self.round > self.blueprint.rounds
        return self._rounds_are_over

    @property
    def _rounds_are_over(self) -> bool:
        return self.round >= self.blueprint.rounds or self.early_stopping.reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why training ended before its last round; None if all rounds ran."""
        ended_early = self.early_stopping.round != self.blueprint.rounds
        if ended_early:
            return self.early_stopping.reason
        return None

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside states and the round, as JSON."""
        return {
            "early_stopping": self.early_stopping.state(),
            "best": self.best.state(),
            "finished": self.finished,
            "rounds": self.blueprint.rounds,
            "vmap_clients": self.fleet.vmap_clients,
            **self._steps_of_records.state(),
            **self.rounds.state(),
        }

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on after `round` from what `progress` returned."""
        self._is_set_up = True
        self.early_stopping.restore(progress["early_stopping"])
        self.best.restore(progress["best"])
        self.fleet.vmap_clients = progress["vmap_clients"]
        self._steps_of_records.restore(progress)
        self.rounds.restore(progress, self.round)

    def sample(self, round: int) -> tuple[ClientIndex, ...]:
        """Return the cohort of a round, in ascending order."""
        return self.rounds.sample(round)

    def state_hash(self) -> str:
        """Return a hash of the server's state and of every client's, equal for bit-identical outcomes.

        The states of clients are fetched and hashed one by one, so that the hash needs no more memory with many.
        """
        return outcome_hash(self.state, self.fleet.states)

    def _stage(self, stage: Stage, round: int, turn: Turn) -> Record:
        """Run all exchanges of a stage or round."""
        began = time.perf_counter()
        record = Record(stage=stage, round=round, cohort=len(turn.clients))
        exchanges = self.algorithm.exchanges(stage)
        cohort: tuple[ClientIndex, ...] = ()
        if exchanges:
            cohort = turn.clients
        for number, exchange in enumerate(exchanges):
            last = number == len(exchanges) - 1
            moment = Moment(stage, round, number)
            ctx = self.ctx.at(moment, cohort=cohort, staleness=turn.staleness)
            self._choose_vmap_clients(exchange, ctx, record)
            self._exchange(exchange, ctx, record, turn, last)
            self._steps_of_records.add(exchange, ctx)
        ctx = self.ctx.at(Moment(stage, round), cohort=cohort)
        spent = None
        if exchanges:
            spent = self.algorithm.privacy_spent(ctx, self.state)
        if spent is not None:
            note_privacy(record, spent)
        self._steps_of_records.report(ctx, record)
        if stage == "round":
            examples = self.examples[list(cohort)].tolist()
            record.bytes_formula = bytes_by_formula(self.algorithm, ctx, examples)
            for name in self.algorithm.traits.logged_scalars:
                if name in self.state:
                    value = Value(name, float(self.state[name]), sum(examples))
                    record.scores.append(as_score(value, split="train", point="global"))
        record.seconds["total"] = time.perf_counter() - began
        return record

    def _choose_vmap_clients(self, exchange: Exchange, ctx: Context, record: Record) -> None:
        """Have the fleet measure how many clients to train at once, before the first exchange that trains."""
        if self.fleet.vmap_clients is not None:
            return
        largest = max(ctx.cohort, key=lambda client: int(self.examples[client]))
        of_largest = ctx.at(client=largest, examples=int(self.examples[largest]))
        if steps_of(exchange, of_largest, drop_last=self.blueprint.drop_last):
            self._streams.begin("broadcast", ctx.moment, cohort=ctx.cohort)
            most = min(len(ctx.cohort), self.blueprint.cohort)
            request = Request(moment=ctx.moment, cohort=ctx.cohort, clients=(largest,), vmap_clients=most)
            self.fleet.choose_vmap_clients(request, *downloads(exchange, ctx, self.state, request.clients))
            record.vmap_clients = self.fleet.vmap_clients

    def _exchange(self, exchange: Exchange, ctx: Context, record: Record, turn: Turn, last: bool) -> None:
        """Broadcast, train, average, aggregate."""
        times = [time.perf_counter()]
        down, unicast, to_all = self._broadcast(exchange, ctx, turn)
        times.append(time.perf_counter())

        request = self._request(exchange, ctx, last)
        result = self.rounds.exchange(request, down, unicast)
        self._models_before = result.models_before
        times.append(time.perf_counter())

        self._aggregate(exchange, ctx, result, down, request.weights)
        self._check_finite(ctx)
        times.append(time.perf_counter())

        add_to(record.bytes_down, to_all)
        self._note(record, times, result, unicast)
        began = time.perf_counter()
        scores, maps = self.evaluator.with_representation_scores(result.scored, request.metrics, ctx.round)
        # in a round with several exchanges, the training of the last one counts
        record.scores = [*scores, *result.training]
        record.maps = maps
        record.seconds["evaluate"] += time.perf_counter() - began

    def _broadcast(self, exchange: Exchange, ctx: Context, turn: Turn) -> tuple[State, States, Mapping[str, int]]:
        """Return what all clients download, what single clients download beside it, and the bytes of the first."""
        with untouched(f"{type(exchange).__name__}.broadcast", server=self.state):
            self._streams.begin("broadcast", ctx.moment, cohort=turn.starting)
            at = ctx.at(cohort=turn.starting or ctx.cohort)
            down, unicast = downloads(exchange, at, self.state, turn.starting)
            to_all = exchange.received_bytes(ctx, self.state, down, turn.starting)
        return down, unicast, to_all

    def _request(self, exchange: Exchange, ctx: Context, last: bool) -> ExchangeRequest:
        """Return what hosts are asked to do in an exchange; `last`: it is the last one of the round."""
        due = last and ctx.stage == "round" and self.evaluation.due(ctx.round, self.blueprint.rounds)
        score_splits: tuple[str, ...] = ()
        if due and "trained" in self.evaluation.points:
            score_splits = self.evaluation.splits
        return ExchangeRequest(
            moment=ctx.moment,
            cohort=ctx.cohort,
            clients=ctx.cohort,
            weights=self._weights(exchange, ctx),
            score_splits=score_splits,
            metrics=self._due_metrics(ctx, last, due),
            models_before=self._models_before,
        )

    def _aggregate(
        self,
        exchange: Exchange,
        ctx: Context,
        result: ExchangeResult,
        down: State,
        weights: Mapping[ClientIndex, float],
    ) -> None:
        """Average what the clients sent, with the `weights` of clients, and update the server's state."""
        replies = sorted(result.replies, key=lambda reply: reply.client)
        if exchange.server_side_weighting:
            own = exchange.weights(ctx, self.state, replies)
            weights = {reply.client: float(weight) for reply, weight in zip(replies, own, strict=True)}
        weights = dict(self.rounds.in_mean(ctx, weights))
        total = self.rounds.total(exchange, ctx, result, down, weights)
        mean = {}
        if total.value is not None:
            mean = ctx.task.to_memory_format(total.result())
        total = result.total = ExactSum()  # twice the memory of the mean
        with untouched(f"{type(exchange).__name__}.aggregate", server=self.state):
            self._streams.begin("aggregate", ctx.moment, cohort=ctx.cohort)
            in_order = [weights[reply.client] for reply in replies]
            state = self._aggregated(exchange, ctx, Replies(mean, replies, in_order))
            self.state = ctx.task.model.consistent(state)

    def _weights(self, exchange: Exchange, ctx: Context) -> dict[ClientIndex, float]:
        """Return the weights of the clients in the mean; all are 0 where they sum to 0."""

        def own(client: ClientIndex) -> float:
            return exchange.weight(ctx.at(client=client), int(self.examples[client]))

        if ctx.stage == "round":
            return self.rounds.weights(own, ctx.cohort)
        return normalised_weights(own, ctx.cohort)

    def _aggregated(self, exchange: Exchange, ctx: Context, replies: Replies) -> State:
        name = type(exchange).__name__
        try:
            state = exchange.aggregate(ctx, self.state, replies)
        except KeyError as error:
            field = None
            if error.args:
                field = error.args[0]
            if field not in exchange.averaged or field in replies.mean:
                raise
            raise BadHook(f"{name}.aggregate: no client sent {field!r}, which is in averaged; finish must") from error
        if not isinstance(state, dict):
            raise BadHook(f"{name}.aggregate returned {type(state).__name__}, not the server's next state, a dict")
        return state

    def _due_metrics(self, ctx: Context, last: bool, scored: bool) -> DueMetrics:
        """Return the metrics of this exchange: metrics of training need no scored models, other metrics do."""
        if ctx.stage != "round":
            return NO_METRICS
        due = self.evaluator.due_metrics(ctx.round, ctx.cohort, ctx.rounds)  # a final stage trains for no scores
        if scored and last:
            return due
        return replace(due.only(OfTraining), last=last)

    def _check_finite(self, ctx: Context) -> None:
        named = list(named_tensors(self.state))
        finite = []
        for _, tensor in named:
            finite.append(all_finite(tensor).to(ctx.task.device))
        if finite and bool(torch.stack(finite).all()):  # one wait for the device
            return
        for path, tensor in named:
            if not ctx.task.is_finite(path, tensor):
                raise Diverged(f"round {ctx.round}, server: {path} is no longer finite")

    def _note(self, record: Record, times: Sequence[float], result: ExchangeResult, unicast: States) -> None:
        """Add the seconds of an exchange to `record`, and the bytes of single clients."""
        record.add_work(result.busy, result.predicted)
        record.gpu_bytes = max(record.gpu_bytes or 0, result.gpu_bytes) or None
        on_hosts = max(result.busy.values(), default=0.0)
        trained = [seconds - result.scoring.get(host, 0.0) for host, seconds in result.busy.items()]
        train = max(trained, default=0.0)
        began, sent, replied, aggregated = times
        record.seconds["broadcast"] += sent - began
        record.seconds["train"] += train
        record.seconds["upload"] += replied - sent - on_hosts
        record.seconds["aggregate"] += aggregated - replied
        record.seconds["evaluate"] += on_hosts - train  # seconds of scoring the trained models
        for fields in unicast.values():
            add_to(record.bytes_down, bytes_by_field(fields))
        for by_field in result.sent.values():
            add_to(record.bytes_up, by_field)

    def _add_scores(
        self, record: Record, cohort: Sequence[ClientIndex], *, with_unseen_clients: bool = False
    ) -> Record:
        """Add the scores of the present state to `record`."""
        began = time.perf_counter()
        scores, maps, predictions = self.evaluator.scores_and_maps(self.state, record.round, cohort)
        record.scores += scores
        record.maps += maps
        record.predictions += predictions
        if with_unseen_clients:
            last = self.early_stopping.round or self.blueprint.rounds
            record.scores += self.evaluator.unseen_scores(self.state, last)
        self.best.add(record)
        seconds = time.perf_counter() - began
        record.seconds["evaluate"] += seconds
        record.seconds["total"] += seconds
        return record

    def _add_last_scores(self, record: Record, cohort: Sequence[ClientIndex]) -> None:
        """Add the scores that are due only after the last round, because training stops early after this one."""
        began = time.perf_counter()
        metrics = self.evaluation.metrics.values()
        if any(not metric.due(record.round, self.blueprint.rounds) for metric in metrics):
            scores, maps, _ = self.evaluator.scores_and_maps(self.state, record.round, cohort, is_last=True)
            record.scores = _first_of_each(_key, [*record.scores, *scores])
            record.maps = _first_of_each(_place, [*record.maps, *maps])
        record.scores += self.evaluator.unseen_scores(self.state, record.round)
        seconds = time.perf_counter() - began
        record.seconds["evaluate"] += seconds
        record.seconds["total"] += seconds


def _without_reports(scores: Sequence[Score], *, scored: bool) -> list[Score]:
    """Return the scores of a round without the means over local steps that have the name and place of a model's score.

    Otherwise a curve would mix the two, and a row would not be unique. `scored` says whether models were scored in this
    round; their scores come first in `scores`.
    """
    if not scored:
        names = {("train", "trained", "accuracy"), ("train", "trained", "loss")}
        return [score for score in scores if (score.split, score.point, score.metric) not in names]
    return _first_of_each(_key, scores)


def _first_of_each(key: Callable[[_Item], Hashable], items: Iterable[_Item]) -> list[_Item]:
    """Return the first item with each key."""
    first: dict[Hashable, _Item] = {}
    for item in items:
        first.setdefault(key(item), item)
    return list(first.values())


def _key(score: Score) -> tuple[Any, ...]:
    return score.point, score.client, score.split, score.domain, score.metric, score.unseen


def _place(map: RepresentationMap) -> tuple[str, ...]:
    return map.name, map.point, map.split, map.layer


def bytes_by_formula(algorithm: Algorithm, ctx: Context, examples: Sequence[int]) -> float | None:
    """Return the bytes by `Algorithm.bytes_formula`, or None if the algorithm's own class does not define it."""
    own = vars(type(algorithm)).get("bytes_formula")
    if own is None:
        return None
    count: float | None = own(algorithm, ctx, examples)
    return count
