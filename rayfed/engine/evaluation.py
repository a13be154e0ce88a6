"""The evaluation protocol: which models are scored, when, and on whose data."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayfed.algorithm import Algorithm, Context, Exchange, State
from rayfed.core.best_round import Selection
from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientIndex
from rayfed.core.moment import Moment
from rayfed.core.records import RepresentationMap, Score
from rayfed.core.rng import generator, seed_torch, stream_seed
from rayfed.data.clients import SPLITS
from rayfed.data.population import Population
from rayfed.engine.cohorts import participants_of
from rayfed.engine.early_stopping import StopRule
from rayfed.engine.fleet import Fleet
from rayfed.engine.metric_collection import NO_METRICS, DueMetrics, gradient_scores
from rayfed.engine.requests import ExchangeRequest, Scored, ScoreRequest
from rayfed.engine.serialization import bytes_by_field
from rayfed.metrics.base import Metric, OfPredictions


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and what to score.

    Attributes:
        every: Score after every so many rounds, and after the last.
        initial: Whether to score before the first round as well.
        points: The models to score: "global", "downloaded", "trained", "adapted".
        splits: The parts of the clients' data to score on.
        clients: "all" participants, "selected" for the cohort of the round, or the size of a fixed sample.
        adapt_epochs: The epochs of local training before scoring at "adapted".
        metrics: Further metrics by name.
        selection: Which round is the best.
        stop_rule: When training stops early; None: never.
    """

    every: int = 1
    initial: bool = False
    points: tuple[str, ...] = ("global",)
    splits: tuple[str, ...] = ("val", "test")
    clients: str | int = "all"
    adapt_epochs: int = 1
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)
    stop_rule: StopRule | None = None

    @property
    def scores_training(self) -> bool:
        """Whether models are scored after local training on the data that they were trained on."""
        return "trained" in self.points and "train" in self.splits

    def due(self, round: int, rounds: int) -> bool:
        """Return whether to score after `round` of `rounds`."""
        return round % self.every == 0 or round == rounds


def downloads(
    exchange: Exchange, ctx: Context, state: State, clients: Sequence[ClientIndex] | None = None
) -> tuple[State, dict[ClientIndex, State]]:
    """Return (what every client of the cohort receives, the further fields of the clients that receive some).

    Args:
        clients: The clients of the cohort whose further fields are needed; None: all.
    """
    down = exchange.broadcast(ctx, state)
    unicast = {i: exchange.unicast(ctx.at(client=i), state) for i in (ctx.cohort if clients is None else clients)}
    return down, {i: fields for i, fields in unicast.items() if fields}


class Evaluator:
    """Scores what a server's state is worth to its clients.

    Attributes:
        tell: Called with what is being done, where it may take long.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        algorithm: Algorithm,
        ctx: Context,
        fleet: Fleet,
        population: Population,
        seed: int,
    ):
        self.evaluation, self.algorithm, self.ctx, self.fleet, self.seed = evaluation, algorithm, ctx, fleet, seed
        self.participants = participants_of(population)
        self._scored = _sample(self.participants, evaluation.clients, seed)
        places = range(len(self.participants), len(population.clients))
        self.unseen_clients = tuple(ClientIndex(place) for place in places)
        self.population = population
        self.tell: Callable[[str], None] = lambda doing: None
        self._last_round = ctx.rounds + bool(algorithm.final_exchanges)  # the final stage is scored as a round, too

    def evaluated(
        self, state: State, round: int, cohort: Sequence[ClientIndex], *, is_last: bool = False
    ) -> tuple[list[Score], list[RepresentationMap]]:
        """Score the global model on the clients' data and the server's test sets, and what clients download.

        Without a global model, each client's downloaded model is scored on the domains that no client holds.

        With `is_last`, the metrics are taken that are due after the last round. The order of the scores does not depend
        on where clients live. Maps of representations are returned, too.
        """
        clients = tuple(cohort) if self.evaluation.clients == "selected" else self._scored
        points, splits = self.evaluation.points, self.evaluation.splits
        # Metrics that are taken once look at the final models, after the final stage.
        metrics = self.due_metrics(round, clients, round if is_last else self._last_round)
        request = ScoreRequest(
            moment=Moment("round", min(round, self.ctx.rounds)),  # the final stage ends no round of its own
            cohort=self.participants,
            clients=clients,
            splits=splits,
            points=points,
            adapt_epochs=self.evaluation.adapt_epochs,
            tests=tuple(range(len(self.population.tests))),
            metrics=metrics,
        )
        ctx = self.ctx.at(request.moment, cohort=request.cohort)
        scored, model = Scored(), None
        seed_torch(self.seed, "evaluate", round=round)
        if "global" in points or self.population.tests or metrics.gradients:
            model = self.algorithm.global_model(ctx, state)
            if model is not None:
                scored.add(self.fleet.score_global(request.part(clients if "global" in points else ()), model))
                if metrics.gradients:
                    on = {split for metric in metrics.gradients for split in metric.splits}
                    gradients = self.fleet.gradients(replace(request, splits=tuple(sorted(on))), model)
                    scored.scores += gradient_scores(metrics.gradients, gradients)
            elif "global" in points:
                raise UsageError("evaluate.points=[global]: parts of the model stay with the clients; use downloaded")
        ood = tuple(k for k, test in enumerate(self.population.tests) if test.split == "ood") if model is None else ()
        if ood or {"downloaded", "adapted"} & set(points):
            scored.add(self._score_downloads(state, replace(request, tests=(), client_tests=ood)))
        scores, maps = self.completed(scored, metrics, round)
        return in_order(scores), maps

    def due_metrics(self, round: int, clients: Sequence[ClientIndex], last: int) -> DueMetrics:
        """Return the metrics that are due in `round`, in which `clients` are scored; `last` is the last such round."""
        if not self.evaluation.metrics:
            return NO_METRICS
        due = {name: metric for name, metric in self.evaluation.metrics.items() if metric.due(round, last)}
        groups = Counter(test.split for test in self.population.tests)
        for split in SPLITS:
            groups[split] += int((self.population.clients.sizes[list(clients), SPLITS.index(split)] > 0).sum())
        return DueMetrics(due, groups, selection=self.evaluation.selection)

    def completed(self, scored: Scored, metrics: DueMetrics, round: int) -> tuple[list[Score], list[RepresentationMap]]:
        """Return the hosts' scores and those of the metrics of representations."""
        seed = stream_seed(self.seed, "metrics", round=round) % 2**31
        classes, device = self.population.num_classes, self.ctx.task.device
        scores, maps = metrics.representation_scores(scored.collected, classes, seed, device, self.tell)
        return [*scored.scores, *scores], maps

    def training_losses(
        self, state: State, round: int, clients: tuple[ClientIndex, ...]
    ) -> tuple[dict[ClientIndex, float], dict[str, int]]:
        """Return the loss of each client on its training data with what it would download, and the bytes of that."""
        request = ScoreRequest(
            moment=Moment("round", round), cohort=clients, clients=clients, splits=("train",), points=("downloaded",)
        )
        seed_torch(self.seed, "ask for losses", round=round)
        exchange = self.algorithm.round_exchanges[0]
        down, unicast = downloads(exchange, self.ctx.at(request.moment, cohort=clients), state)
        scored = self.fleet.score_downloads(request, down, unicast)
        index = {self.population.clients.id(i): i for i in clients}
        losses = {index[score.client]: score.value for score in scored.scores if score.metric == "loss"}
        return {i: losses.get(i, 0.0) for i in clients}, bytes_by_field(down)  # without training data, nothing to learn

    def unseen_scores(self, state: State, round: int) -> list[Score]:
        """Score the unseen clients, which catch up on the setup, as they download the model of `round` and adapted.

        What they send in the setup exchanges is dropped.
        """
        cohort = self.unseen_clients
        if not cohort:
            return []
        for number, exchange in enumerate(self.algorithm.setup_exchanges):
            moment = Moment("setup", 0, number)
            seed_torch(self.seed, "broadcast", moment, cohort=cohort)
            down, unicast = downloads(exchange, self.ctx.at(moment, cohort=cohort), state)
            weights = dict.fromkeys(cohort, 1 / len(cohort))
            self.fleet.exchange(
                ExchangeRequest(moment=moment, cohort=cohort, clients=cohort, weights=weights), down, unicast
            )
        seed_torch(self.seed, "evaluate unseen clients")
        request = ScoreRequest(
            moment=Moment("round", round),
            cohort=cohort,
            clients=cohort,
            splits=self.evaluation.splits,
            points=("downloaded", "adapted"),
            adapt_epochs=self.evaluation.adapt_epochs,
            metrics=DueMetrics(self.evaluation.metrics, selection=self.evaluation.selection).only(OfPredictions),
        )
        return in_order(self._score_downloads(state, request).scores)

    def _score_downloads(self, state: State, request: ScoreRequest) -> Scored:
        exchange = self.algorithm.round_exchanges[0]
        ctx = self.ctx.at(request.moment, cohort=request.cohort)
        return self.fleet.score_downloads(request, *downloads(exchange, ctx, state, request.clients))


def _sample(participants: Sequence[ClientIndex], clients: str | int, seed: int) -> tuple[ClientIndex, ...]:
    """Return the participants to score: all, or a sample that depends on the seed of the run alone."""
    if isinstance(clients, str) or clients >= len(participants):
        return () if clients == "selected" else tuple(participants)
    drawn = generator(seed, "evaluated clients").choice(len(participants), clients, replace=False)
    return tuple(sorted(ClientIndex(i) for i in drawn.tolist()))


def in_order(scores: Sequence[Score]) -> list[Score]:
    """Return `scores` in an order that does not depend on where the clients live."""
    return sorted(scores, key=lambda s: (s.point, s.client, s.split, s.domain, s.metric))
