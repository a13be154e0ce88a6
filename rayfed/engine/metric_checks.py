"""Which metrics make sense: refused before anything starts."""

from rayfed.core.errors import UsageError
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.evaluation import Evaluation
from rayfed.metrics.base import OfGradients, OfPredictions, OfRepresentations
from rayfed.metrics.representations import check_layer


def check_metrics(blueprint: Blueprint, population: Population, evaluation: Evaluation, *, whole: bool) -> None:
    """Raises UsageError for a metric of what is not there: classes, a layer, a split, a global model.

    `whole`: the server's model is the network with all its weights, so that gradients can be taken there.
    """
    labels = population.clients[0].train.y
    scored = {*evaluation.splits, *(test.split for test in population.tests)}
    for name, metric in evaluation.metrics.items():
        classes = labels.ndim == 1 and labels.dtype.kind in "iu"
        if isinstance(metric, (OfPredictions, OfRepresentations)) and not classes:
            raise UsageError(f"metrics.{name}: needs data with classes; these labels are {labels.dtype}")
        if isinstance(metric, OfRepresentations):
            if metric.split not in scored:  # what it is fitted to need not be
                raise UsageError(
                    f"metrics.{name}.split={metric.split}: no such data are scored; known: "
                    f"{', '.join(sorted(scored))}; evaluate.splits says which"
                )
            for layer in metric.layers:
                check_layer(blueprint.model, layer, f"metrics.{name}.layers")
        if isinstance(metric, OfGradients) and not whole:
            raise UsageError(f"metrics.{name}: needs a global model, and the server has none of this network here")
