"""Refuses metrics that the data, the model or the algorithm cannot have, before anything starts."""

import math
from collections.abc import Mapping, Sequence

import torch

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.core.outputs import Outputs, class_logits
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation
from rayfed.metrics.base import Metric, OfGradients, OfPredictions, OfRepresentations
from rayfed.metrics.representations import check_layer
from rayfed.records.metric_names import lower_is_better_by_name

_MOST_CLIENTS = 1000  # that are looked at, to find out what a metric is going to measure


def check_metrics(blueprint: Blueprint, population: Population, evaluation: Evaluation, *, whole: bool) -> None:
    """Raise an error for a metric that needs classes, a layer, a split or a global model that does not exist.

    Args:
        whole: whether the server's model is the whole network, so that gradients can be taken there.

    Raises:
        UsageError: the metric, and what it lacks.
    """
    labels = population.clients[0].train.y
    scored = {*evaluation.splits, *(test.split for test in population.tests)}
    for name, metric in evaluation.metrics.items():
        classes = labels.ndim == 1 and labels.dtype.kind in "iu"
        if isinstance(metric, OfRepresentations) and not classes:
            raise UsageError(f"metrics.{name}: needs data with classes; these labels are {labels.dtype}")
        if isinstance(metric, OfPredictions) and metric.requires_classes and blueprint.outputs == "unknown":
            raise UsageError(
                f"metrics.{name}: needs outputs that stand for classes, and by this loss and these labels "
                f"({labels.dtype}) they do not; docs/evaluation.md says which do"
            )
        if isinstance(metric, OfRepresentations):
            if metric.split not in scored:  # the splits that it is fitted to need not be scored
                raise UsageError(
                    f"metrics.{name}.split={metric.split}: this split is not scored; scored splits: "
                    f"{', '.join(sorted(scored))}; set evaluate.splits to score others"
                )
            for layer in metric.layers:
                check_layer(blueprint.model, layer, f"metrics.{name}.layers")
        if isinstance(metric, OfGradients) and not whole:
            raise UsageError(f"metrics.{name}: needs a global model, and the server has no whole model here")


def chosen_metric(
    name: str | None,
    mode: str | None,
    metrics: Mapping[str, Metric],
    population: Population,
    outputs: Outputs,
    shape: Sequence[int],
) -> tuple[str, bool]:
    """Return the metric that chooses, as tables call it, and whether higher is better.

    Args:
        name: The metric, or its key in `metrics`; None: accuracy, or loss where there is no accuracy.
        mode: "max" or "min", for a metric that does not declare it.
        metrics: Those that are switched on.
        outputs, shape: What the model's output for one example stands for, and its shape.

    Raises:
        UsageError: The metric cannot choose.
    """
    declared: dict[str, bool | None] = {"loss": False} if outputs == "unknown" else {"accuracy": True, "loss": False}
    name = name or next(iter(declared))
    if name == "accuracy" and name not in declared:
        raise UsageError("select.metric=accuracy: there is no accuracy here; use loss")
    if name not in declared:
        if name in metrics and not isinstance(metrics[name], OfPredictions):
            raise UsageError(f"select.metric={name}: only accuracy, loss and metrics of predictions can choose")
        measured = [metrics[name]] if name in metrics else list(metrics.values())
        values = _defined_values(measured, population, outputs, shape)
        if name in metrics and not values:
            raise UsageError(f"select.metric={name}: has no value on the validation data of any client")
        if name in metrics and name not in values and len(values) == 1:
            name = next(iter(values))
        declared |= {value: by for value, by in values.items() if value not in declared}
    if name not in declared:
        raise UsageError(f"select.metric={name}: no such value is measured; {suggestion(name, declared)}")
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
    """Return the values that metrics of predictions have for some client's validation data, by name.

    They are measured with random outputs, since what is defined follows from the labels. Each says whether higher is
    better, None where nothing declares it.
    """
    rng = torch.Generator().manual_seed(0)
    values: dict[str, bool | None] = {}
    for client in population.participants[:_MOST_CLIENTS]:
        y = torch.from_numpy(client.val.y.copy())
        for metric in metrics if len(y) else ():
            if not isinstance(metric, OfPredictions):
                continue
            raw = torch.randn(len(y), *shape, generator=rng), y
            arguments = class_logits(outputs, *raw) if metric.requires_classes else raw
            for value in metric.each(metric.measure(*(arguments or raw))):
                value = metric.declared(value)
                if not math.isnan(value.value):
                    values[value.metric] = value.higher_is_better
    return values
