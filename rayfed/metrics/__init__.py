"""Metrics besides accuracy and loss, and the table of their names. `base` is their interface."""

from collections.abc import Mapping
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion

METRICS = {
    "dice": "rayfed.metrics.predictions:Dice",
    "mean_iou": "rayfed.metrics.predictions:MeanIou",
    "perplexity": "rayfed.metrics.predictions:Perplexity",
    "average_precision": "rayfed.metrics.predictions:AveragePrecision",
    "mae": "rayfed.metrics.predictions:Mae",
    "rmse": "rayfed.metrics.predictions:Rmse",
    "r2": "rayfed.metrics.predictions:R2",
    "concordance": "rayfed.metrics.survival:Concordance",
    "auroc": "rayfed.metrics.predictions:Auroc",
    "f1": "rayfed.metrics.predictions:F1",
    "balanced_accuracy": "rayfed.metrics.predictions:BalancedAccuracy",
    "ece": "rayfed.metrics.predictions:Ece",
    "class_accuracy": "rayfed.metrics.predictions:ClassAccuracy",
    "attack_success": "rayfed.metrics.attacks:AttackSuccess",
    "drift": "rayfed.metrics.heterogeneity:Drift",
    "gradient_norm": "rayfed.metrics.heterogeneity:GradientNorm",
    "mdl": "rayfed.metrics.representations:Mdl",
    "frechet": "rayfed.metrics.representations:Frechet",
    "head_accuracy": "rayfed.metrics.representations:HeadAccuracy",
    "tsne": "rayfed.metrics.representations:Tsne",
}

PREFIX = "torchmetrics:"
"""The beginning of the names of torchmetrics' own metrics, as in `torchmetrics:classification.BinaryMCC`."""
DEFAULTS = {
    "labels": ("f1", "average_precision"),
    "numbers": ("mae", "rmse", "r2"),
    "survival": ("concordance",),
}
"""The metrics that are on by default where outputs stand for no classes, by what they stand for; the first chooses."""


def default_metrics(kind: str, axes: int) -> tuple[str, ...]:
    """Return the names of the metrics that are on by default, besides accuracy and loss.

    `kind` is what outputs stand for (`rayfed.core.outputs`), and `axes` is the number of axes of a batch's labels.
    """
    if kind != "positions":
        return DEFAULTS.get(kind, ())
    if axes > 2:
        return ("mean_iou",)
    return ("perplexity",)


def chosen_metrics(chosen: Any) -> dict[str, Mapping[str, Any]]:
    """Return the options of the metrics that are switched on, by name, without importing a metric.

    `chosen` maps names to options, to true (the default options) or to false (off).
    """
    if not isinstance(chosen, Mapping):
        names = chosen
        if isinstance(chosen, list):
            names = ", ".join(map(str, chosen))
        raise UsageError(f"metrics={names}: expected a mapping, as in metrics.ece=true or metrics.ece.every=5")
    metrics: dict[str, Mapping[str, Any]] = {}
    for name, options in chosen.items():
        if options is False or options is None:
            continue
        if options is True:
            options = {}
        if not isinstance(options, Mapping):
            raise UsageError(f"metrics.{name}={options!r}: expected true, or a mapping of options such as every")
        if name not in METRICS and ":" not in name:
            hint = "your own is written metrics.module:Name"
            raise UsageError(f"metrics.{name}: no such metric; {suggestion(name, METRICS, prefix='metrics.')} ({hint})")
        metrics[name] = options
    return metrics
