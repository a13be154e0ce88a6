"""What is scored and when: point x clients x split x domain, of the server's state as it is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayfed.algorithm import Algorithm, Context, State
from rayfed.core.errors import UsageError
from rayfed.core.records import RepresentationMap, Score
from rayfed.core.rng import seed_of, seed_torch
from rayfed.data.population import Population
from rayfed.engine.fleet import Fleet
from rayfed.engine.host_data import Scored
from rayfed.engine.metric_collection import NO_METRICS, DueMetrics, gradient_scores
from rayfed.metrics.base import Metric, OfPredictions


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and what to score: every how many rounds, at which points, on which splits, whose, after how much
    adaptation. `clients` is "all" or "selected", the participants of the round."""

    every: int = 1
    initial: bool = False
    points: tuple[str, ...] = ("global",)
    splits: tuple[str, ...] = ("val", "test")
    clients: str = "all"
    adapt_epochs: int = 1
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def due(self, round: int, rounds: int) -> bool:
        return round % self.every == 0 or round == rounds


class Evaluated(NamedTuple):
    """Scores in an order that does not depend on where clients live, and maps of representations."""

    scores: list[Score]
    maps: list[RepresentationMap]


def sent(algorithm: Algorithm, ctx: Context, state: State) -> tuple[State, dict[int, State]]:
    """(what everyone of the context's cohort is sent, the further fields of those who are sent some)."""
    down = algorithm.broadcast(ctx, state)
    own = {i: algorithm.unicast(ctx.at(client=i), state) for i in ctx.cohort}
    return down, {i: fields for i, fields in own.items() if fields}


class Evaluator:
    """Scores what a server's state is worth to its clients."""

    def __init__(
        self, evaluation: Evaluation, algorithm: Algorithm, ctx: Context, fleet: Fleet, people: Population, seed: int
    ):
        self.evaluation, self.algorithm, self.ctx, self.fleet, self.seed = evaluation, algorithm, ctx, fleet, seed
        trained = len(people.participants)
        self.everyone = tuple(range(trained))
        self.unseen_clients = tuple(range(trained, len(people.clients)))
        self.people = people
        self._ends_later = bool(algorithm.final_exchanges)  # a round R + 1 is scored, too

    def evaluated(self, state: State, round: int, cohort: Sequence[int]) -> Evaluated:
        """Of the global model on clients' data and the server's test sets, and of what clients download."""
        ids = tuple(cohort) if self.evaluation.clients == "selected" else self.everyone
        now = self._now(min(round, self.ctx.rounds), self.everyone)  # the final exchange ends no round of its own
        ctx, points, splits = self.ctx.at(**now), self.evaluation.points, self.evaluation.splits
        # metrics that come once look at the models that are left in the end, after the final exchange
        measures, found, scores = self.measures(round, ids, self.ctx.rounds + self._ends_later), [], []
        seed_torch(self.seed, "evaluate", round)
        if "global" in points or self.people.tests or measures.gradients:
            model = self.algorithm.global_model(ctx, state)
            if model is not None:
                mine = ids if "global" in points else ()
                found.append(self.fleet.score_global(mine, model, now, splits, measures))
                if measures.gradients:
                    on = {split for metric in measures.gradients for split in metric.splits}
                    scores += gradient_scores(measures.gradients, self.fleet.gradients(ids, model, now, on))
            elif "global" in points:
                raise UsageError("evaluate.points=[global]: parts of the model stay with the clients; use downloaded")
        if {"downloaded", "adapted"} & set(points):
            found.append(self._downloads(state, ids, now, points, measures))
        more = self.completed(Scored.together(found), measures, round)
        return Evaluated(in_order([*scores, *more.scores]), more.maps)

    def measures(self, round: int, ids: Sequence[int], last: int) -> DueMetrics:
        """The metrics that are due in a round in which the clients `ids` are scored; `last` is the last such round."""
        if not self.evaluation.metrics:
            return NO_METRICS
        due = {name: metric for name, metric in self.evaluation.metrics.items() if metric.due(round, last)}
        groups = Counter(test.split for test in self.people.tests)
        for split in ("train", "val", "test"):
            groups[split] += sum(len(getattr(self.people.clients[i], split)) > 0 for i in ids)
        return DueMetrics(due, groups)

    def completed(self, found: Scored, measures: DueMetrics, round: int) -> Evaluated:
        """What hosts scored, and what the metrics make of the representations that hosts caught."""
        scores, maps = measures.representation_scores(
            found.collected, self.people.num_classes, seed_of(self.seed, "metrics", round) % 2**31, self.ctx.task.device
        )
        return Evaluated([*found.scores, *scores], maps)

    def unseen_scores(self, state: State) -> list[Score]:
        """Of the unseen clients, who catch up on the setup (what they send is dropped), download, and adapt."""
        if not self.unseen_clients:
            return []
        for trip in range(self.algorithm.setup_exchanges):
            now = {"stage": "setup", "round": 0, "trip": trip, "cohort": self.unseen_clients}
            seed_torch(self.seed, "broadcast", *now.values())
            down, own = sent(self.algorithm, self.ctx.at(**now), state)
            weights = dict.fromkeys(self.unseen_clients, 1 / len(self.unseen_clients))
            self.fleet.exchange(self.unseen_clients, down, own, weights, now, (), NO_METRICS)
        seed_torch(self.seed, "evaluate", "unseen_clients")
        now = self._now(self.ctx.rounds, self.unseen_clients)
        measures = DueMetrics(self.evaluation.metrics).only(OfPredictions)
        return in_order(self._downloads(state, self.unseen_clients, now, ("downloaded", "adapted"), measures).scores)

    def _downloads(
        self, state: State, ids: Sequence[int], now: Mapping[str, Any], points: Sequence[str], measures: DueMetrics
    ) -> Scored:
        down, own = sent(self.algorithm, self.ctx.at(**now), state)
        mine = {i: own[i] for i in ids if i in own}
        how = self.evaluation.splits, self.evaluation.adapt_epochs
        return self.fleet.score_downloads(ids, down, mine, now, points, *how, measures)

    def _now(self, round: int, cohort: tuple[int, ...]) -> dict[str, Any]:
        return {"stage": "round", "round": round, "trip": 0, "cohort": cohort}


def in_order(scores: Sequence[Score]) -> list[Score]:
    """Alike wherever the clients live."""
    return sorted(scores, key=lambda s: (s.point, s.client, s.split, s.domain, s.metric))
