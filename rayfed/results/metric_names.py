"""What the name of a metric tells: whether less is better, and whether it is a share that readers expect in percent.

Names are words joined by `_`; what follows `@` names the layer of a representation (`mdl@logits`) and tells nothing.
Of metrics that are neither good nor bad (`drift`, `gradient_norm`), the side of a homogeneous federation is the better.
"""

import pandas as pd

_LOWER_IS_BETTER = frozenset(
    {"loss", "error", "nll", "mse", "mae", "rmse", "ece", "brier", "perplexity", "mdl", "fid", "frechet", "entropy"}
    | {"divergence", "probe", "drift", "gradient"}
)
_SHARES = frozenset({"accuracy", "acc", "ece", "probe"})


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of `metric` is the better one (`test_loss`, `mdl`, ...)."""
    return not _LOWER_IS_BETTER.isdisjoint(_words(metric))


def lower_are_better(metrics: pd.Series) -> pd.Series:
    """`lower_is_better` of each, as booleans even where there is none."""
    return metrics.map(lower_is_better).astype(bool)


def badness(values: pd.Series, metrics: pd.Series) -> pd.Series:
    """`values`, or their negatives where more is better: the least is the best."""
    return values.where(lower_are_better(metrics), -values)


def is_share(metric: str) -> bool:
    """Whether `metric` is a fraction of 1 that readers expect in percent (`accuracy_class_3`, `client_probe`, ...)."""
    return not _SHARES.isdisjoint(_words(metric))


def _words(metric: str) -> list[str]:
    return metric.lower().partition("@")[0].replace("-", "_").split("_")
