"""What scores would be on other test examples: bootstrap replicates of recorded predictions, a sample per client.

All methods and seeds of an experiment share the draws, so that differences between them are paired by test example.

Draws of m examples vary less than other m examples would, by (m - 1)/m in variance. For metrics of ranks, m is that of
the rarer class, which may be small, so their replicates are spread accordingly. One example of a class says nothing of
others: where it decides more than a tenth of a mean, there are no replicates.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.registry import resolve
from rayfed.core.rng import numpy_generator
from rayfed.metrics import METRICS

DRAWS = 1000
"""The draws where the scores of all draws are computed at once."""
FEW_DRAWS = 200
"""The draws where each score takes a call of a metric."""
_LONE = 0.1  # the share of clients with one example of a class, up to which a mean over clients has replicates
_CLOSE = 1e-6  # what single precision may change about a score
_Scores = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Part(NamedTuple):
    """The predictions for the test examples of a client.

    Attributes:
        domain: The client's domain.
        outputs: The outputs of the model, float32 [n, k].
        labels: The labels, float32 [n] or [n, k].
    """

    domain: str
    outputs: np.ndarray
    labels: np.ndarray


class Replicated(NamedTuple):
    """The score of a client, and its replicates on other test examples.

    Attributes:
        domain: The client's domain.
        score: The score; NaN where the examples leave it undefined.
        replicates: Its replicates [draws].
        labels: The labels of the test examples, by which methods are checked to share them.
        is_lone: Whether one example of a class decides the score.
    """

    domain: str
    score: float
    replicates: np.ndarray
    labels: np.ndarray
    is_lone: bool = False


def parts_of(rows: pd.DataFrame) -> dict[int, Part]:
    """Return the predictions for each client; `rows` are of the table `predictions`, of one trial, round and point."""
    parts = {}
    for row in rows.to_dict("records"):
        flat = np.array(row["outputs"], np.float32)  # copies, as torch wants to own them
        outputs = flat.reshape(row["n"], -1)
        labels = np.array(row["labels"], np.float32)
        if row["kind"] in ("labels", "numbers"):
            labels = labels.reshape(row["n"], -1)
        client = int(row["client"])
        parts[client] = Part(str(row["domain"]), outputs, labels)
    return parts


def replicated(parts: Mapping[int, Part], metric: str, options: Mapping[str, Any]) -> dict[int, Replicated] | None:
    """Return the scores of the clients with their replicates; None if the metric cannot be computed from predictions.

    Args:
        parts: The predictions for each client.
        metric: Its name in the table `metrics`.
        options: Its options, `metrics.NAME.*` of the configuration.
    """
    scores = _scores_by(metric, tuple(sorted(options.items())))
    if scores is None:
        return None
    replicates = {}
    for client, part in parts.items():
        count = len(part.outputs)
        whole = scores(part.outputs, part.labels, np.arange(count)[None])
        drawn = scores(part.outputs, part.labels, _draws(client, count))
        value = float(whole[0])
        fewest = _fewest(metric, part.labels)
        if fewest > 1:
            drawn = value + (drawn - value) * math.sqrt(fewest / (fewest - 1))
        replicates[client] = Replicated(part.domain, value, drawn, part.labels, is_lone=fewest == 1)
    return replicates


def _fewest(metric: str, labels: np.ndarray) -> int:
    """Return the number of examples of the rarest class that has any, for a metric of ranks; 0 for other metrics.

    Its only examples are ranked against those of other classes, so that their number decides how much it varies.
    """
    if metric not in METRICS or labels.ndim > 1:
        return 0
    from rayfed.metrics.predictions import Ranking

    if not issubclass(resolve(METRICS[metric], {}, where="metrics"), Ranking):
        return 0
    _, counts = np.unique(labels, return_counts=True)
    if len(counts) < 2:
        return 0
    return int(counts.min())


@functools.lru_cache(maxsize=256)
def _draws(client: int, count: int) -> np.ndarray:
    """Return the positions of the examples in each draw, integers [DRAWS, count]."""
    return numpy_generator(0, client, count).integers(0, count, (DRAWS, count))


@functools.lru_cache(maxsize=8)
def _scores_by(metric: str, options: tuple[tuple[str, Any], ...]) -> _Scores | None:
    """Return the function that scores draws [draws, n] of outputs and labels; None if there is none for this metric."""
    if metric == "accuracy":
        return _accuracies
    if metric not in METRICS:
        return None
    from rayfed.metrics.base import OfPredictions
    from rayfed.metrics.predictions import Ranking

    kind = resolve(METRICS[metric], {}, where="metrics")
    if not issubclass(kind, OfPredictions):
        return None
    measured = kind(**dict(options))
    if issubclass(kind, Ranking):
        return functools.partial(_rankings, measured)
    return functools.partial(_measured, measured, metric)


def _accuracies(outputs: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> np.ndarray:
    correct = outputs.argmax(1) == labels
    return np.asarray(correct[draws].mean(1))


def _rankings(metric: Any, outputs: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the values of a metric of ranks, which scores many draws of two classes at once."""
    if outputs.shape[1] != 2 or labels.ndim > 1:
        return _measured(metric, metric.name, outputs, labels, draws)
    scores = outputs[:, 1].astype(float) - outputs[:, 0]
    drawn = scores[draws].T
    positive = (labels == 1)[draws].T
    has_others = ~positive.all(0) | (not metric.needs_others)
    defined = positive.any(0) & has_others
    values = np.full(len(draws), np.nan)
    of_defined = metric.of_scores(drawn[:, defined], positive[:, defined])
    values[defined] = of_defined
    return values


def _measured(metric: Any, name: str, outputs: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the values of any metric of predictions, one draw after the other, of the first `FEW_DRAWS`."""
    import torch

    y = torch.from_numpy(labels)
    if metric.kinds != ("numbers",):
        y = y.long()
    logits = torch.from_numpy(outputs)
    values = np.full(min(len(draws), FEW_DRAWS), np.nan)
    for number in range(len(values)):
        rows = torch.from_numpy(draws[number])
        for value in metric.values(logits[rows], y[rows]):
            if value.metric == name:
                values[number] = float(value.value)
    return values


def of_site(replicates: Mapping[int, Replicated], site: str | int | None) -> dict[int, Replicated]:
    """Return the clients of a domain, or one client by its number, or all clients for None, that have a score."""
    kept = {}
    for client, one in replicates.items():
        belongs = site is None or site in (one.domain, client)
        if belongs and not np.isnan(one.score):
            kept[client] = one
    return kept


def paired(first: Mapping[int, Replicated], second: Mapping[int, Replicated]) -> tuple[float, np.ndarray] | None:
    """Return the second minus the first, as means over clients: the difference, and its replicates [draws].

    Replicates are NaN if more than a tenth of the clients have one example of a class. The result is None if the two
    were not scored on the same examples of the same clients.
    """
    if not first or first.keys() != second.keys():
        return None
    lone = sum(one.is_lone for one in first.values())
    differences = []
    replicates = []
    for client, one in first.items():
        other = second[client]
        if not np.array_equal(one.labels, other.labels):
            return None
        differences.append(other.score - one.score)
        replicates.append(other.replicates - one.replicates)
    draws = np.mean(replicates, axis=0)
    if lone > _LONE * len(first):
        draws = np.full_like(draws, np.nan)
    return float(np.mean(differences)), draws


def agrees(one: float, other: float) -> bool:
    """Return whether a score from predictions is the recorded one, up to rounding."""
    return abs(one - other) <= _CLOSE * max(1.0, abs(other))
