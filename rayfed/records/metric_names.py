"""The meaning of a metric's name: whether lower is better, unless declared, and whether it is a fraction.

The words of a name are joined by `_`. The layer of a representation after `@` (`mdl@logits`) is ignored.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_LOWER_IS_BETTER = frozenset(
    {"loss", "error", "nll", "mse", "mae", "rmse", "ece", "brier", "perplexity", "mdl", "fid", "frechet", "entropy"}
    | {"divergence", "probe", "drift", "gradient"}
)
_FRACTIONS = frozenset({"accuracy", "acc", "auroc", "f1", "ece", "probe"})


def default_metric(metrics: "pd.DataFrame") -> str:
    """Return the metric that chooses by default: accuracy, or loss where labels are no classes."""
    of_training = (metrics["split"] == "train") & (metrics["point"] == "trained")
    present = set(metrics.loc[~of_training, "metric"].unique())
    return "loss" if "loss" in present and "accuracy" not in present else "accuracy"


def lower_is_better_by_name(metric: str) -> bool:
    """Return whether the name of a metric that declares nothing says that lower is better (`test_loss`)."""
    return not _LOWER_IS_BETTER.isdisjoint(_words(metric))


def as_cost(values: "pd.Series", higher_is_better: "pd.Series") -> "pd.Series":
    """Return `values`, negated where higher is better, so that the lowest is the best."""
    return (-values).where(higher_is_better, values)


def ranking_cost(values: "pd.Series", higher_is_better: "pd.Series") -> "pd.Series":
    """Return the comparable cost of `values`, by which means are ranked so that ties are ties."""
    return comparable(as_cost(values, higher_is_better))


def comparable(values: "pd.Series") -> "pd.Series":
    """Return `values` to twelve significant digits, so that rounding errors of means do not tell equal ones apart."""
    sizes = values.abs().where(np.isfinite(values) & (values != 0), 1.0)
    scale = 10.0 ** (11 - np.floor(np.log10(sizes))).clip(-300, 300)
    return (values * scale).round() / scale


def is_fraction(metric: str) -> bool:
    """Return whether `metric` is a fraction of 1, shown in percent (`accuracy_class_3`, `client_probe`, …)."""
    return not _FRACTIONS.isdisjoint(_words(metric))


def _words(metric: str) -> list[str]:
    return metric.lower().partition("@")[0].replace("-", "_").split("_")
