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
from rayfed.core.rng import generator, stream_seed
from rayfed.core.round_record import Predictions, Record, RepresentationMap, Score, Selection, lower_is_better_by_name
from rayfed.core.trees import bytes_by_field
from rayfed.core.words import first_few
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
_SMALL = 10  # clients; a metric is tried with their labels
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
        keep_predictions: Whether the predictions for test examples are recorded.
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
    keep_predictions: bool = False

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
        if rule is None or self.reason is not None:
            return
        score = rule.selection.score(record)
        if score is None:
            return
        gain = rule.selection.gain
        is_better = self.best is None or gain(score) - gain(self.best) > rule.min_delta
        if is_better and math.isfinite(score):
            self.best = score
            self.best_round = record.round
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= rule.patience:
            self.round = record.round
            evaluations = "1 evaluation"
            if rule.patience != 1:
                evaluations = f"{rule.patience} evaluations"
            missed = "been finite"
            if self.best is not None:
                best = f"{self.best:.4g} of round {self.best_round}"
                missed = f"improved on {best} by more than {rule.min_delta:g}"
            what = f"validation {rule.selection.metric} ({rule.selection.point})"
            self.reason = f"{what} has not {missed} for {evaluations}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        values = dict(vars(self))
        del values["rule"]
        return values

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        vars(self).update(state)


def downloads(
    exchange: Exchange, ctx: Context, state: State, clients: Sequence[ClientIndex] | None = None
) -> tuple[State, dict[ClientIndex, State]]:
    """Return what every client of the cohort receives, and the further fields that some of `clients` receive."""
    down = exchange.broadcast(ctx, state)
    if clients is None:
        clients = ctx.cohort
    unicast = {}
    for client in clients:
        fields = exchange.unicast(ctx.at(client=client), state)
        if fields:
            unicast[client] = fields
    return down, unicast


class Evaluator:
    """Has the fleet score the models that follow from the server's state.

    Attributes:
        tell: Called with what is measured, where that may take long.
    """

    def __init__(
        self, evaluation: Evaluation, blueprint: Blueprint, ctx: Context, fleet: Fleet, population: Population
    ):
        self.evaluation = evaluation
        self.ctx = ctx
        self.fleet = fleet
        self.algorithm = blueprint.algorithm
        self.seed = blueprint.seed
        self._streams = blueprint.streams
        self.participants = participants_of(population)
        scorable = self.participants
        if evaluation.left_out:
            scorable = []
            for client in self.participants:
                if client not in evaluation.left_out:
                    scorable.append(client)
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
    ) -> tuple[list[Score], list[RepresentationMap], list[Predictions]]:
        """Return the scores of the global model and of what clients download, maps, and the predictions to record.

        The global model is scored on the clients' data and the server's test sets. Without a global model, each
        client's downloaded model is scored on the domains that no client holds. The order of the scores does not depend
        on where clients live. With `is_last`, metrics that are due after the last round are measured, too.
        """
        # Metrics that are taken once look at the final models, after the final stage.
        last_round = self._last_round
        if is_last:
            last_round = round
        clients = self._scored
        if self.evaluation.clients == "selected":
            clients = tuple(client for client in cohort if client not in self.evaluation.left_out)
        request = self._request(round, clients, self.due_metrics(round, clients, last_round))
        self._streams.begin("evaluate", round=round)
        scored = Scored()
        ood: tuple[int, ...] = ()
        model = self._global_model(request, state)
        if model is not None:
            self._score_global(scored, request, model)
        else:
            ood = tuple(k for k, test in enumerate(self.population.tests) if test.split == "ood")
        if ood or "downloaded" in request.points or "adapted" in request.points:
            scored.add(self._score_downloads(state, replace(request, tests=(), client_tests=ood)))
        scores, maps = self.with_representation_scores(scored, request.metrics, round, ends_round=True)
        predictions = sorted(scored.predictions, key=lambda one: (one.point, one.client, one.split, one.domain))
        return in_order(scores), maps, predictions

    def _request(self, round: int, clients: tuple[ClientIndex, ...], metrics: DueMetrics) -> ScoreRequest:
        """Return what to score after a round: `clients`, and all test sets of the server."""
        return ScoreRequest(
            moment=Moment("round", min(round, self.ctx.rounds)),  # the final stage ends no round of its own
            cohort=self.participants,
            clients=clients,
            splits=self.evaluation.splits,
            points=self.evaluation.points,
            adapt_epochs=self.evaluation.adapt_epochs,
            tests=tuple(range(len(self.population.tests))),
            metrics=metrics,
        )

    def _global_model(self, request: ScoreRequest, state: State) -> Any:
        """Return the global model; None if there is none, or if nothing of it is asked for."""
        if "global" not in request.points and not request.tests and not request.metrics.of(OfGradients):
            return None
        ctx = self.ctx.at(request.moment, cohort=request.cohort)
        return self.algorithm.global_model(ctx, state)

    def _score_global(self, scored: Scored, request: ScoreRequest, model: Any) -> None:
        """Add the scores of the global model on the clients' data and the server's test sets, and by its gradients."""
        clients: Sequence[ClientIndex] = ()
        if "global" in request.points:
            clients = request.clients
        scored.add(self.fleet.score_global(request.part(clients), model))
        of_gradients = request.metrics.of(OfGradients)
        if of_gradients:
            splits = set[str]().union(*(metric.splits for metric in of_gradients))
            on_these = replace(request, splits=tuple(sorted(splits)))
            scored.scores += gradient_scores(of_gradients, self.fleet.gradients(on_these, model))

    def kept(self, scores: Sequence[Score]) -> list[Score]:
        """Return the scores of a round's training without those of participants that are left out."""
        return [score for score in scores if score.client not in self._left_out]

    def due_metrics(self, round: int, clients: Sequence[ClientIndex], last: int) -> DueMetrics:
        """Return the metrics that are due in `round`, for which `clients` are scored; `last` is the last round."""
        keep = self.evaluation.keep_predictions
        if not self.evaluation.metrics:
            return replace(NO_METRICS, keep_predictions=keep)
        due = {}
        for name, metric in self.evaluation.metrics.items():
            if metric.due(round, last):
                due[name] = metric
        groups = Counter(test.split for test in self.population.tests)
        for split in SPLITS:
            sizes = self.population.clients.sizes[list(clients), SPLITS.index(split)]
            groups[split] += int((sizes > 0).sum())
        return DueMetrics(due, groups, selection=self.evaluation.selection, keep_predictions=keep)

    def with_representation_scores(
        self, scored: Scored, metrics: DueMetrics, round: int, *, ends_round: bool = False
    ) -> tuple[list[Score], list[RepresentationMap]]:
        """Return the hosts' scores with those of the metrics of representations, and the maps.

        With `ends_round`, maps of several points show the representations of the whole round.
        """
        seed = stream_seed(self.seed, "metrics", round=round) % 2**31
        classes = self.population.num_classes
        device = self.ctx.task.device
        joint = []
        if ends_round:
            joint = [*self._trained, *scored.collected]
        if ends_round:
            self._trained = []
        else:
            self._trained = scored.collected
        scores, maps = metrics.representation_scores(scored.collected, classes, seed, device, self.tell, joint=joint)
        return [*scored.scores, *scores], maps

    def training_losses(
        self, state: State, round: int, clients: tuple[ClientIndex, ...]
    ) -> tuple[dict[ClientIndex, float], dict[str, int]]:
        """Return each client's training loss of the model that it would download, and the download's bytes by field."""
        moment = Moment("round", round)
        request = ScoreRequest(
            moment=moment, cohort=clients, clients=clients, splits=("train",), points=("downloaded",)
        )
        self._streams.begin("ask for losses", round=round)
        exchange = self.algorithm.round_exchanges[0]
        down, unicast = downloads(exchange, self.ctx.at(moment, cohort=clients), state)
        scored = self.fleet.score_downloads(request, down, unicast)
        index = {}
        for i in clients:
            index[self.population.clients.id(i)] = i
        losses = {}
        for score in scored.scores:
            if score.metric == "loss":
                losses[index[score.client]] = score.value
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
            training = ExchangeRequest(moment=moment, cohort=cohort, clients=cohort, weights=weights)
            self.fleet.exchange(training, down, unicast)
        self._streams.begin("evaluate unseen clients")
        due = DueMetrics(self.evaluation.metrics, selection=self.evaluation.selection).only(OfPredictions)
        request = ScoreRequest(
            moment=Moment("round", round),
            cohort=cohort,
            clients=cohort,
            splits=self.evaluation.splits,
            points=("downloaded", "adapted"),
            adapt_epochs=self.evaluation.adapt_epochs,
            metrics=due,
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
        if clients == "selected":
            return ()
        return tuple(participants)
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
    classes = labels.ndim == 1 and labels.dtype.kind in "iu"
    kind = blueprint.outputs.kind
    for name, metric in evaluation.metrics.items():
        if isinstance(metric, OfPredictions) and metric.requires_classes and kind not in metric.kinds:
            needed = " or ".join(dict.fromkeys(map(_in_words, metric.kinds)))
            stand = "do not"
            if kind != "unknown":
                stand = f"stand for {_in_words(kind)}"
            found = f"by this loss and these labels ({labels.dtype}) they {stand}"
            raise UsageError(
                f"metrics.{name}: needs outputs that stand for {needed}, and {found}; docs/evaluation.md says which do"
            )
        if isinstance(metric, OfRepresentations):
            if not classes:
                raise UsageError(f"metrics.{name}: needs data with classes; these labels are {labels.dtype}")
            if metric.split not in scored:  # the splits that it is fitted to need not be scored
                known = ", ".join(sorted(scored))
                raise UsageError(
                    f"metrics.{name}.split={metric.split}: this split is not scored; scored splits: {known}; set "
                    "evaluate.splits to score others"
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
    declared: dict[str, bool | None] = {"loss": False}
    default = next(iter((*default_metrics(outputs.kind, 1), "loss")))
    if outputs.kind in OF_CLASSES:
        declared = {"accuracy": True, "loss": False}
        default = "accuracy"
    if name is None and default in metrics:
        metric = metrics[default]
        measured = default in _defined_values([metric], population, outputs, shape)
        if measured or not population.participants.have_validation:
            return default, bool(metric.higher_is_better)
        default = "loss"
    name = name or default
    if name not in declared:
        asked = list(metrics.values())
        if name in metrics:
            asked = [metrics[name]]
        values = _defined_values(asked, population, outputs, shape)
        if name in metrics and name not in values and len(values) == 1:
            name = next(iter(values))
        declared = values | declared
    if name not in declared:
        _refuse_undefined(name, asked, population, outputs, shape, is_key=name in metrics)
        raise _no_such_score(name, [*declared], outputs)
    return name, _direction(name, mode, declared[name])


def _no_such_score(name: str, declared: Sequence[str], outputs: Outputs) -> UsageError:
    """Return the error of a name that no metric of predictions has."""
    fit = []
    for key, path in METRICS.items():
        kind = pkgutil.resolve_name(path)
        if key != name and issubclass(kind, OfPredictions) and outputs.kind in kind.kinds:
            fit.append(key)
    known = suggestion(name, [*declared, *fit])
    return UsageError(f"select.metric={name}: predictions have no such score; {known}")


def _direction(name: str, mode: str | None, higher_is_better: bool | None) -> bool:
    """Return whether higher is better: as the metric declares it, else by `mode`, else by the name."""
    if higher_is_better is None:
        if mode:
            return mode == "max"
        return not lower_is_better_by_name(name)
    side = "higher"
    other_mode = "min"
    if not higher_is_better:
        side = "lower"
        other_mode = "max"
    if mode == other_mode:
        raise UsageError(f"select.mode={mode}: {name} declares that {side} is better; leave the mode out")
    return higher_is_better


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
    rng = torch.Generator().manual_seed(0)
    raw = torch.randn(len(y), *shape, generator=rng), y
    values: dict[str, bool | None] = {}
    for metric in metrics:
        if not isinstance(metric, OfPredictions):
            continue
        if metric.requires_classes:
            arguments = scored_values(outputs, *raw)
        else:
            arguments = raw
        for value in metric.values(*(arguments or raw)):
            if not math.isnan(value.value):
                values[value.metric] = value.higher_is_better
    return values


def refuse_void_validation(key: str, value: Any, population: Population, outputs: Outputs) -> None:
    """Raise UsageError for a key that needs validation scores if all validation labels are ignored."""
    labels = []
    for client in population.participants[:_MOST_CLIENTS]:
        labels.append(client.val.y)
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
    fit = []
    for metric in metrics:
        if isinstance(metric, OfPredictions) and outputs.kind in metric.kinds:
            fit.append(metric)
    parts = []
    for client in population.participants[:_SMALL]:
        for part in client.parts:
            parts.append(part.y)
    classes = 2
    if outputs.axis and shape:
        classes = shape[outputs.axis - 1]
    labels = _with_every_class(np.concatenate(parts), classes)
    values = _values_on(labels, fit, outputs, shape)
    if name in values or (is_key and len(values) == 1):
        where = f"select.metric={name}: has no value on any client's validation data"
        raise UsageError(f"{where}: {_lack(population)}; give clients more validation examples, or choose by loss")


def _with_every_class(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return `labels` [n, ...] with all of the classes, or with zeros and ones, in place of the first labels."""
    complete = labels.copy()
    are_bits = labels.dtype.kind != "f" or np.isin(labels, (0, 1)).all()
    if not are_bits:
        return complete
    if labels.ndim == 2:
        complete[0] = 0
        complete[1:2] = 1
    else:
        first = complete.reshape(-1)[: max(classes, 2)]
        first[:] = np.arange(len(first))
    return complete


def _lack(population: Population) -> str:
    """Return in words which classes the clients' validation data have."""
    labels = []
    for client in population.participants[:_MOST_CLIENTS]:
        if len(client.val):
            labels.append(client.val.y)
    if not labels:
        return f"none of the first {_MOST_CLIENTS} clients has any"
    if labels[0].dtype.kind == "f":
        constant = sum(bool((part == part[0]).all()) for part in labels)
        return f"of {len(labels)} clients with such data, {constant} have equal labels only"
    single = sum(bool((part == part.flat[0]).all()) for part in labels)
    held = Counter[int]()
    for part in labels:
        held.update(map(int, np.unique(part)))
    counts = [f"class {label} at {count}" for label, count in sorted(held.items())]
    share = f"{single} have one class only ({first_few(counts, _CLASSES_TOLD)})"
    return f"of {len(labels)} clients with such data, {share}"
