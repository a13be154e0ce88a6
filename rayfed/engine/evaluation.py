"""The evaluation protocol: which models are scored, when, on whose data, and which round is the last."""

import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rayfed.algorithm import Context, Exchange, State
from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.options import suggestion
from rayfed.core.outputs import Kind, Outputs, scored_values
from rayfed.core.records import Record, RepresentationMap, Score, Selection, lower_is_better_by_name
from rayfed.core.rng import generator, stream_seed
from rayfed.core.trees import bytes_by_field
from rayfed.data.population import SPLITS, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.fleet import ExchangeRequest, Fleet, ScoreRequest
from rayfed.engine.scoring import NO_METRICS, DueMetrics, Scored, gradient_scores
from rayfed.metrics import METRICS, default_metrics
from rayfed.metrics.base import (
    OF_CLASSES,
    Metric,
    OfChangedInputs,
    OfGradients,
    OfPredictions,
    OfRepresentations,
    Representations,
)
from rayfed.metrics.representations import check_layer

_MOST_CLIENTS = 1000  # whose labels are looked at to find out which values a metric has
_SMALL = 10  # clients with the labels of which a metric is tried
_CLASSES_TOLD = 8  # at most, in an error


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When training stops: after `patience` evaluations in a row that did not improve the best score.

    Deep learning libraries use this rule; Prechelt ("Early Stopping - But When?", 1998) compares it with others.

    Attributes:
        min_delta: An improvement must exceed the best score by more than this.
        selection: Which score counts.
    """

    patience: int
    min_delta: float = 0.0
    selection: Selection = field(default_factory=Selection)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and what to score.

    Attributes:
        every: The rounds between evaluations; the last round is always scored.
        initial: Whether to score before the first round as well.
        points: The models to score: "global", "downloaded", "trained", "adapted".
        splits: The parts of the clients' data to score on.
        clients: "all" for all participants, "selected" for the cohort of the round, or the size of a fixed sample.
        adapt_epochs: The epochs of local training before scoring at "adapted".
        metrics: Further metrics by name.
        selection: Which round is the best.
        stop_rule: When training stops early; None: never.
        left_out: The participants that are never scored, such as attackers.
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
    left_out: frozenset[int] = frozenset()

    def due(self, round: int, rounds: int) -> bool:
        """Return whether to score after `round` of `rounds`."""
        return round % self.every == 0 or round == rounds


@dataclass
class EarlyStopping:
    """Applies a `StopRule` to the rounds of a trial. A checkpoint keeps all other fields.

    Attributes:
        best, best_round: The best score and its round; None and 0 before the first one.
        waited: The evaluations since then.
        reason: Why training stopped, in words; None while it goes on.
        round: The round after which training stopped; None while it goes on.
    """

    rule: StopRule | None
    best: float | None = None
    best_round: int = 0
    waited: int = 0
    reason: str | None = None
    round: int | None = None

    def update(self, record: Record) -> None:
        """Apply the rule to the score of a round, if it has one. A score that is not finite is no improvement."""
        rule = self.rule
        if rule is None or self.reason is not None or (score := rule.selection.score(record)) is None:
            return
        gain = rule.selection.gain
        if math.isfinite(score) and (self.best is None or gain(score) - gain(self.best) > rule.min_delta):
            self.best, self.best_round, self.waited = score, record.round, 0
            return
        self.waited += 1
        if self.waited >= rule.patience:
            self.round = record.round
            evaluations = "1 evaluation" if rule.patience == 1 else f"{rule.patience} evaluations"
            missed = "been finite"
            if self.best is not None:
                missed = f"improved on {self.best:.4g} of round {self.best_round} by more than {rule.min_delta:g}"
            what = f"validation {rule.selection.metric} ({rule.selection.point})"
            self.reason = f"{what} has not {missed} for {evaluations}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {name: value for name, value in vars(self).items() if name != "rule"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        vars(self).update(state)


def downloads(
    exchange: Exchange, ctx: Context, state: State, clients: Sequence[ClientIndex] | None = None
) -> tuple[State, dict[ClientIndex, State]]:
    """Return what every client of the cohort receives, and the further fields that some of `clients` receive."""
    down = exchange.broadcast(ctx, state)
    unicast = {i: exchange.unicast(ctx.at(client=i), state) for i in (ctx.cohort if clients is None else clients)}
    return down, {i: fields for i, fields in unicast.items() if fields}


class Evaluator:
    """Has the fleet score the models that follow from the server's state.

    Attributes:
        tell: Called with what is measured, where that may take long.
    """

    def __init__(
        self, evaluation: Evaluation, blueprint: Blueprint, ctx: Context, fleet: Fleet, population: Population
    ):
        self.evaluation, self.ctx, self.fleet = evaluation, ctx, fleet
        self.algorithm, self.seed = blueprint.algorithm, blueprint.seed
        self._streams = blueprint.streams
        self.participants = participants_of(population)
        scorable = self.participants
        if evaluation.left_out:
            scorable = [client for client in self.participants if client not in evaluation.left_out]
        self._scored = _sample(scorable, evaluation.clients, self.seed)
        self._left_out = frozenset(population.clients.id(client) for client in evaluation.left_out)
        places = range(len(self.participants), len(population.clients))
        self.unseen_clients = tuple(map(ClientIndex, places))
        self.population = population
        self.tell: Callable[[str], None] = lambda doing: None
        self._trained: list[Representations] = []  # of the round under way, for joint maps
        # the final stage is scored as a round, too
        self._last_round = ctx.rounds + bool(self.algorithm.final_exchanges)

    def scores_and_maps(
        self, state: State, round: int, cohort: Sequence[ClientIndex], *, is_last: bool = False
    ) -> tuple[list[Score], list[RepresentationMap]]:
        """Return the scores of the global model and of what clients download, and the maps of representations.

        The global model is scored on the clients' data and the server's test sets. Without a global model, each
        client's downloaded model is scored on the domains that no client holds. The order of the scores does not depend
        on where clients live. With `is_last`, metrics that are due after the last round are measured, too.
        """
        clients = self._scored
        if self.evaluation.clients == "selected":
            clients = tuple(client for client in cohort if client not in self.evaluation.left_out)
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
        self._streams.begin("evaluate", round=round)
        of_gradients = metrics.of(OfGradients)
        if "global" in points or self.population.tests or of_gradients:
            model = self.algorithm.global_model(ctx, state)
            if model is not None:
                scored.add(self.fleet.score_global(request.part(clients if "global" in points else ()), model))
                if of_gradients:
                    on = {split for metric in of_gradients for split in metric.splits}
                    gradients = self.fleet.gradients(replace(request, splits=tuple(sorted(on))), model)
                    scored.scores += gradient_scores(of_gradients, gradients)
        ood = tuple(k for k, test in enumerate(self.population.tests) if test.split == "ood") if model is None else ()
        if ood or {"downloaded", "adapted"} & set(points):
            scored.add(self._score_downloads(state, replace(request, tests=(), client_tests=ood)))
        scores, maps = self.with_representation_scores(scored, metrics, round, ends_round=True)
        return in_order(scores), maps

    def kept(self, scores: Sequence[Score]) -> list[Score]:
        """Return the scores of a round's training without those of participants that are left out."""
        return [score for score in scores if score.client not in self._left_out]

    def due_metrics(self, round: int, clients: Sequence[ClientIndex], last: int) -> DueMetrics:
        """Return the metrics that are due in `round`, for which `clients` are scored; `last` is the last round."""
        if not self.evaluation.metrics:
            return NO_METRICS
        due = {name: metric for name, metric in self.evaluation.metrics.items() if metric.due(round, last)}
        groups = Counter(test.split for test in self.population.tests)
        for split in SPLITS:
            groups[split] += int((self.population.clients.sizes[list(clients), SPLITS.index(split)] > 0).sum())
        return DueMetrics(due, groups, selection=self.evaluation.selection)

    def with_representation_scores(
        self, scored: Scored, metrics: DueMetrics, round: int, *, ends_round: bool = False
    ) -> tuple[list[Score], list[RepresentationMap]]:
        """Return the hosts' scores with those of the metrics of representations, and the maps.

        With `ends_round`, maps of several points show the representations of the whole round.
        """
        seed = stream_seed(self.seed, "metrics", round=round) % 2**31
        classes, device = self.population.num_classes, self.ctx.task.device
        joint = [*self._trained, *scored.collected] if ends_round else []
        self._trained = [] if ends_round else scored.collected
        scores, maps = metrics.representation_scores(scored.collected, classes, seed, device, self.tell, joint=joint)
        return [*scored.scores, *scores], maps

    def training_losses(
        self, state: State, round: int, clients: tuple[ClientIndex, ...]
    ) -> tuple[dict[ClientIndex, float], dict[str, int]]:
        """Return each client's training loss of the model that it would download, and the download's bytes by field."""
        request = ScoreRequest(
            moment=Moment("round", round), cohort=clients, clients=clients, splits=("train",), points=("downloaded",)
        )
        self._streams.begin("ask for losses", round=round)
        exchange = self.algorithm.round_exchanges[0]
        down, unicast = downloads(exchange, self.ctx.at(request.moment, cohort=clients), state)
        scored = self.fleet.score_downloads(request, down, unicast)
        index = {self.population.clients.id(i): i for i in clients}
        losses = {index[score.client]: score.value for score in scored.scores if score.metric == "loss"}
        return {i: losses.get(i, 0.0) for i in clients}, bytes_by_field(down)  # 0 without training data

    def unseen_scores(self, state: State, round: int) -> list[Score]:
        """Return the scores of unseen clients on the model that they download after `round`, and after they adapt it.

        They first take part in the setup exchanges, without effect on the server.
        """
        cohort = self.unseen_clients
        if not cohort:
            return []
        for number, exchange in enumerate(self.algorithm.setup_exchanges):
            moment = Moment("setup", 0, number)
            self._streams.begin("broadcast", moment, cohort=cohort)
            down, unicast = downloads(exchange, self.ctx.at(moment, cohort=cohort), state)
            weights = dict.fromkeys(cohort, 1 / len(cohort))
            self.fleet.exchange(
                ExchangeRequest(moment=moment, cohort=cohort, clients=cohort, weights=weights), down, unicast
            )
        self._streams.begin("evaluate unseen clients")
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


def participants_of(population: Population) -> Sequence[ClientIndex]:
    """Return the positions of all clients that take part in training."""
    return range(len(population.clients) - population.unseen_clients)  # type: ignore[return-value]


def _sample(participants: Sequence[ClientIndex], clients: str | int, seed: int) -> tuple[ClientIndex, ...]:
    """Return the participants to score: all, or a sample that depends only on the seed of the run."""
    if isinstance(clients, str) or clients >= len(participants):
        return () if clients == "selected" else tuple(participants)
    drawn = generator(seed, "evaluated clients").choice(len(participants), clients, replace=False)
    return tuple(sorted(participants[place] for place in drawn.tolist()))


def in_order(scores: Sequence[Score]) -> list[Score]:
    """Return `scores` in an order that does not depend on where the clients live."""
    return sorted(scores, key=lambda s: (s.point, s.client, s.split, s.domain, s.metric))


def check_metrics(blueprint: Blueprint, population: Population, evaluation: Evaluation, *, whole: bool) -> None:
    """Raise UsageError if a metric needs classes, a layer, a split or a global model that does not exist.

    `whole` says whether the server's model is the whole network, so that gradients can be taken there.
    """
    labels = population.clients[0].train.y
    scored = {*evaluation.splits, *(test.split for test in population.tests)}
    classes, kind = labels.ndim == 1 and labels.dtype.kind in "iu", blueprint.outputs.kind
    for name, metric in evaluation.metrics.items():
        if isinstance(metric, OfPredictions) and metric.requires_classes and kind not in metric.kinds:
            needed = " or ".join(dict.fromkeys(map(_in_words, metric.kinds)))
            stand = "do not" if kind == "unknown" else f"stand for {_in_words(kind)}"
            raise UsageError(
                f"metrics.{name}: needs outputs that stand for {needed}, and by this loss and these labels "
                f"({labels.dtype}) they {stand}; docs/evaluation.md says which do"
            )
        if isinstance(metric, OfRepresentations):
            if not classes:
                raise UsageError(f"metrics.{name}: needs data with classes; these labels are {labels.dtype}")
            if metric.split not in scored:  # the splits that it is fitted to need not be scored
                raise UsageError(
                    f"metrics.{name}.split={metric.split}: this split is not scored; scored splits: "
                    f"{', '.join(sorted(scored))}; set evaluate.splits to score others"
                )
            for layer in metric.layers:
                check_layer(blueprint.model, layer, f"metrics.{name}.layers")
        if isinstance(metric, OfChangedInputs):
            if blueprint.outputs.kind != "classes":
                raise UsageError(f"metrics.{name}: needs labels that are classes of whole examples")
            metric.check(blueprint.inputs(population), population.num_classes)
        if isinstance(metric, OfGradients) and not whole:
            raise UsageError(f"metrics.{name}: needs a global model, and the server has no whole model here")


def _in_words(kind: Kind) -> str:
    if kind in OF_CLASSES:
        return "classes"
    words = {"labels": "several labels", "survival": "risks of an event"}
    return words.get(kind, kind)


def chosen_metric(
    name: str | None,
    mode: str | None,
    metrics: Mapping[str, Metric],
    population: Population,
    outputs: Outputs,
    shape: Sequence[int],
) -> tuple[str, bool]:
    """Return the metric that chooses rounds and hyperparameters, as tables call it, and whether higher is better.

    Args:
        name: The metric, or its key in `metrics`. None: accuracy, or else f1 of several labels, mae of numbers,
            concordance of risks, or loss.
        mode: "max" or "min", for a metric that does not declare it.
        outputs, shape: What the model's output for one example stands for, and its shape.
    """
    of_classes = outputs.kind in OF_CLASSES
    declared: dict[str, bool | None] = {"accuracy": True, "loss": False} if of_classes else {"loss": False}
    default = "accuracy" if of_classes else next(iter((*default_metrics(outputs.kind, 1), "loss")))
    if name is None and (metric := metrics.get(default)) is not None:
        measured = default in _defined_values([metric], population, outputs, shape)
        if measured or not population.participants.have_validation:
            return default, bool(metric.higher_is_better)
        default = "loss"
    name = name or default
    if name not in declared:
        asked = [metrics[name]] if name in metrics else list(metrics.values())
        values = _defined_values(asked, population, outputs, shape)
        if name in metrics and name not in values and len(values) == 1:
            name = next(iter(values))
        declared = values | declared
    if name not in declared:
        _refuse_undefined(name, asked, population, outputs, shape, is_key=name in metrics)
        classes = {key: pkgutil.resolve_name(path) for key, path in METRICS.items() if key != name}
        fit = [k for k, kind in classes.items() if issubclass(kind, OfPredictions) and outputs.kind in kind.kinds]
        known = suggestion(name, [*declared, *fit])
        raise UsageError(f"select.metric={name}: predictions have no such score; {known}")
    higher_is_better = declared[name]
    if higher_is_better is None:
        return name, mode == "max" if mode else not lower_is_better_by_name(name)
    if mode == ("min" if higher_is_better else "max"):
        side = "higher" if higher_is_better else "lower"
        raise UsageError(f"select.mode={mode}: {name} declares that {side} is better; leave the mode out")
    return name, higher_is_better


def _defined_values(
    metrics: Sequence[Metric], population: Population, outputs: Outputs, shape: Sequence[int]
) -> dict[str, bool | None]:
    """Return the values that metrics of predictions have for any client's validation data, by name.

    Each name maps to whether higher is better; None where nothing declares it. The outputs are random, because labels
    alone decide whether a value is defined.
    """
    values: dict[str, bool | None] = {}
    for client in population.participants[:_MOST_CLIENTS]:
        if len(client.val):
            values |= _values_on(client.val.y, metrics, outputs, shape)
    return values


def _values_on(
    labels: np.ndarray, metrics: Sequence[Metric], outputs: Outputs, shape: Sequence[int]
) -> dict[str, bool | None]:
    """Return the values that metrics of predictions have for `labels`, as `_defined_values` does."""
    y = torch.from_numpy(labels.copy())
    raw = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(0)), y
    values: dict[str, bool | None] = {}
    for metric in metrics:
        if not isinstance(metric, OfPredictions):
            continue
        arguments = scored_values(outputs, *raw) if metric.requires_classes else raw
        for value in metric.measure(*(arguments or raw)):
            value = metric.declared(value)
            if not math.isnan(value.value):
                values[value.metric] = value.higher_is_better
    return values


def refuse_void_validation(key: str, value: Any, population: Population, outputs: Outputs) -> None:
    """Raise UsageError for a key that needs validation scores if all validation labels are ignored."""
    labels = [client.val.y for client in population.participants[:_MOST_CLIENTS]]
    if outputs.ignored is not None and all((part == outputs.ignored).all() for part in labels):
        void = f"all validation labels of the first {len(labels)} clients are {outputs.ignored}, which is ignored"
        raise UsageError(f"{key}={value}: needs validation scores, and {void}")


def _refuse_undefined(
    name: str,
    metrics: Sequence[Metric],
    population: Population,
    outputs: Outputs,
    shape: Sequence[int],
    *,
    is_key: bool,
) -> None:
    """Raise UsageError if a metric would have a value, but not by the validation labels of any client.

    `is_key`: whether `name` is the key of the only one of `metrics`, whose only value may have another name.
    """
    fit = [metric for metric in metrics if isinstance(metric, OfPredictions) and outputs.kind in metric.kinds]
    parts = [part.y for client in population.participants[:_SMALL] for part in client.parts]
    classes = shape[outputs.axis - 1] if outputs.axis and shape else 2
    labels = _with_every_class(np.concatenate(parts), classes)
    values = _values_on(labels, fit, outputs, shape)
    if name in values or (is_key and len(values) == 1):
        where = f"select.metric={name}: has no value on any client's validation data"
        raise UsageError(f"{where}: {_lack(population)}; give clients more validation examples, or choose by loss")


def _with_every_class(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return `labels` [n, ...] with all of the classes, or with zeros and ones, in place of the first labels."""
    complete = labels.copy()
    if labels.dtype.kind == "f" and not np.isin(labels, (0, 1)).all():
        return complete
    if labels.ndim == 2:
        complete[0], complete[1:2] = 0, 1
    else:
        first = complete.reshape(-1)[: max(classes, 2)]
        first[:] = np.arange(len(first))
    return complete


def _lack(population: Population) -> str:
    """Return in words which classes the clients' validation data have."""
    labels = [client.val.y for client in population.participants[:_MOST_CLIENTS] if len(client.val)]
    if not labels:
        return f"none of the first {_MOST_CLIENTS} clients has any"
    if labels[0].dtype.kind == "f":
        constant = sum(bool((part == part[0]).all()) for part in labels)
        return f"of {len(labels)} clients with such data, {constant} have equal labels only"
    single = sum(bool((part == part.flat[0]).all()) for part in labels)
    held = Counter(int(label) for part in labels for label in np.unique(part))
    counts = ", ".join(f"class {label} at {count}" for label, count in sorted(held.items())[:_CLASSES_TOLD])
    more = ", …" if len(held) > _CLASSES_TOLD else ""
    return f"of {len(labels)} clients with such data, {single} have one class only ({counts}{more})"
