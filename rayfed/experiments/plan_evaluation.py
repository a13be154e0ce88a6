"""When and what a plan scores, and which score chooses rounds, after checking that it can be scored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayfed.core.errors import BadHook, UsageError
from rayfed.core.outputs import scored_values
from rayfed.core.registry import resolve
from rayfed.core.round_record import Selection
from rayfed.data.population import SPLITS, Population
from rayfed.engine.evaluation import Evaluation, StopRule, check_metrics, chosen_metric, refuse_void_validation
from rayfed.experiments.checks.model import check_adaptation
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config
from rayfed.experiments.plan_channel import metrics_of, unscored
from rayfed.metrics import DEFAULTS, METRICS, default_metrics
from rayfed.metrics.base import Metric, OfPredictions
from rayfed.metrics.from_torchmetrics import TorchMetric

MOST_CLIENTS_SCORED = 10_000
"""The most participants that are all scored by default."""


CLIENTS_SCORED = 1000
"""The size of the sample of participants that is scored where there are more."""


FEW_PREDICTIONS = 20_000
"""The most outputs for test examples, in numbers per evaluated round, that are recorded by default."""


def planned_evaluation(config: Config, trial: Trial) -> Evaluation:
    """Return when and what to score, and by which score rounds are chosen.

    Raises:
        UsageError: Something of it cannot be scored with these data, this model or this method.
    """
    population = trial.population
    server_model, is_whole = trial.global_model
    points = _points(config, has_global=server_model is not None)
    if "adapted" in points or population.unseen_clients:
        of_participants = "adapted" in points
        check_adaptation(trial, config.evaluate.adapt_epochs, of_participants=of_participants)
    left_out = unscored(trial.blueprint.algorithm)
    evaluation = Evaluation(
        every=config.evaluate.every,
        initial=config.evaluate.initial,
        points=points,
        splits=tuple(config.evaluate.splits),
        clients=_clients_scored(config, len(population.participants) - len(left_out)),
        adapt_epochs=config.evaluate.adapt_epochs,
        metrics=_metrics(config, trial),
        left_out=left_out,
    )
    evaluation = replace(evaluation, keep_predictions=_keeps_predictions(config, trial))
    check_metrics(trial.blueprint, population, evaluation, whole=is_whole)
    _check_torchmetrics(trial, evaluation)
    _try_own_metrics(trial, evaluation.metrics)
    selection = _selection(config, trial, points[0], evaluation.metrics)
    stopping = config.early_stopping
    rule = None
    if stopping.patience is not None:
        rule = StopRule(patience=stopping.patience, min_delta=stopping.min_delta, selection=selection)
    return replace(evaluation, selection=selection, stop_rule=rule)


def _points(config: Config, *, has_global: bool) -> tuple[str, ...]:
    """Return the points to score. The point at which the algorithm's paper scores comes first."""
    requested = config.evaluate.points
    default = config.algorithm.traits.default_eval_point
    if default == "global" and not has_global:
        default = "downloaded"
    if requested and "global" in requested and not has_global:
        raise UsageError(
            f"evaluate.points: algorithm {config.algorithm_name} has no global model here, since parts of the model "
            f"stay with the clients; use evaluate.points=[{default}]"
        )
    return tuple(sorted(requested or (default,), key=lambda point: point != default))


def _clients_scored(config: Config, participants: int) -> str | int:
    """Return which or how many of the participants are scored."""
    clients = config.evaluate.clients
    if clients is None:
        if participants <= MOST_CLIENTS_SCORED:
            return "all"
        clients = CLIENTS_SCORED
    if isinstance(clients, int) and clients > participants:
        raise UsageError(f"evaluate.clients={clients}: there are {participants} participants; give fewer, or all")
    return clients


def _metrics(config: Config, trial: Trial) -> dict[str, Metric]:
    """Return the metrics by name: the default ones of the outputs, those of the method, and those of `config`."""
    metrics: dict[str, Metric] = {}
    for name in default_metrics(trial.blueprint.outputs.kind, trial.population.clients[0].train.y.ndim):
        kind = resolve(METRICS[name], {}, where="metrics")
        metrics[name] = kind()
    metrics |= metrics_of(trial.blueprint.algorithm)
    metrics |= config.metrics
    return metrics


def _check_torchmetrics(trial: Trial, evaluation: Evaluation) -> None:
    """Raise UsageError if a metric of TorchMetrics cannot score the outputs of the model."""
    metrics = [metric for metric in evaluation.metrics.values() if isinstance(metric, TorchMetric)]
    if not metrics:
        return
    outputs, labels = trial.first_outputs(8)
    for metric in metrics:
        metric.check(trial.blueprint.outputs, outputs, labels)


def _try_own_metrics(trial: Trial, metrics: Mapping[str, Metric]) -> None:
    """Raise UsageError if a metric of the user's own returns something else than values for a few examples.

    What it raises itself is told by the trial, which fails, and the others go on.
    """
    own = {name: metric for name, metric in metrics.items() if ":" in name and isinstance(metric, OfPredictions)}
    if not own:
        return
    raw = trial.first_outputs(8)
    scored = scored_values(trial.blueprint.outputs, *raw)
    for name, metric in own.items():
        arguments = raw
        if metric.requires_classes and scored is not None:
            arguments = scored
        try:
            metric.values(*(values.clone() for values in arguments))  # it may change them in place
        except BadHook as error:
            raise UsageError(f"metrics.{name}: {error}") from error
        except Exception:
            continue


def _keeps_predictions(config: Config, trial: Trial) -> bool:
    """Return whether the outputs for test examples are recorded: if asked for, or by default if they are few."""
    if config.evaluate.predictions is not None:
        return config.evaluate.predictions
    kind = trial.blueprint.outputs.kind
    if kind in ("positions", "unknown"):
        return False
    population = trial.population
    examples = sum(len(test.examples) for test in population.tests)
    if "test" in config.evaluate.splits:
        examples += int(population.participants.sizes[:, SPLITS.index("test")].sum())
    outputs = population.num_classes
    if kind in ("labels", "numbers"):
        outputs = math.prod(population.clients[0].train.y.shape[1:])
    return examples * outputs <= FEW_PREDICTIONS


def _selection(config: Config, trial: Trial, point: str, metrics: Mapping[str, Metric]) -> Selection:
    """Return what chooses rounds, after checking that the metric is measured and that there are validation scores."""
    population = trial.population
    meaning = trial.blueprint.outputs
    metric = config.select.metric
    needing: dict[str, Any] = {
        "select.metric": metric,
        "early_stopping.patience": config.early_stopping.patience,
        "checkpoint.best": config.checkpoint.best or None,
    }
    for key, value in needing.items():
        if value is not None:
            check_validated(key, value, population, config.evaluate.splits)
            refuse_void_validation(key, value, population, meaning)
    shape: tuple[int, ...] = ()
    has_no_default = metric is None and meaning.kind not in DEFAULTS
    if metric not in ("accuracy", "loss") and not has_no_default:
        outputs, _ = trial.first_outputs(2)
        shape = outputs.shape[1:]
    name, higher_is_better = chosen_metric(metric, config.select.mode, metrics, population, meaning, shape)
    return Selection(metric=name, higher_is_better=higher_is_better, point=point)


def check_validated(key: str, value: Any, population: Population, splits: Sequence[str]) -> None:
    """Raise UsageError if there are no validation scores, which the key needs."""
    if "val" not in splits or not population.participants.have_validation:
        raise UsageError(
            f"{key}={value}: needs validation scores; give partition.validation above 0, and evaluate.splits with val"
        )
