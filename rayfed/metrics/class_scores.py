"""AUROC, F1 and balanced accuracy, of all predictions on one part of a client's data.

Only classes that the part has examples of count, and their scores are averaged without weights ("macro"). Where the
labels leave a score undefined, there is no value, and none counts as 0: means are taken over the clients that have one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.metrics.base import OfPredictions, Value


@dataclass(frozen=True, kw_only=True)
class Auroc(OfPredictions):
    """`auroc`: the area under the ROC curve; with more than two classes, that of each class against the rest.

    It is the Mann-Whitney statistic: the share of the pairs of an example of the class and another one in which the
    first has the higher score, where ties count half. Scores of more than two classes are softmax probabilities. A part
    with examples of one class only has no value.
    """

    higher_is_better = True

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        from scipy.stats import rankdata  # takes half a second

        logits, count = logits.double(), len(y)
        scores = logits[:, 1:] - logits[:, :1] if logits.shape[1] == 2 else logits.softmax(1)
        first = logits.shape[1] - scores.shape[1]  # with two classes, the second is the positive one
        is_class = y[:, None] == torch.arange(first, logits.shape[1], device=y.device)
        positive = is_class.sum(0).cpu().numpy()
        defined = (positive > 0) & (positive < count)
        if not defined.any():
            return
        ranks = (rankdata(scores.cpu().numpy(), axis=0) * is_class.cpu().numpy()).sum(0)[defined]
        positive = positive[defined]
        areas = (ranks - positive * (positive + 1) / 2) / (positive * (count - positive))
        yield Value("auroc", float(areas.mean()), count)


@dataclass(frozen=True, kw_only=True)
class F1(OfPredictions):
    """`f1`: the F1 score 2 TP / (2 TP + FP + FN) of class 1 if there are two classes, else the mean over classes.

    With two classes, a part without examples of class 1 has no value.
    """

    higher_is_better = True

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        hits, predicted, examples = _counts(logits, y)
        scores = 2 * hits / (predicted + examples)
        present = examples > 0
        if logits.shape[1] == 2:
            scores, present = scores[1:], present[1:]
        if present.any():
            yield Value("f1", float(scores[present].mean()), len(y))


@dataclass(frozen=True, kw_only=True)
class BalancedAccuracy(OfPredictions):
    """`balanced_accuracy`: the mean over classes of the share of their examples that are recognised."""

    higher_is_better = True

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        hits, _, examples = _counts(logits, y)
        present = examples > 0
        yield Value("balanced_accuracy", float((hits[present] / examples[present]).mean()), len(y))


def _counts(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many examples of each class are recognised, are predicted, and are there, float64 [classes]."""
    prediction, classes = logits.argmax(1), logits.shape[1]
    counted = (y[prediction == y], prediction, y)
    hits, predicted, examples = (torch.bincount(values, minlength=classes).double() for values in counted)
    return hits, predicted, examples
