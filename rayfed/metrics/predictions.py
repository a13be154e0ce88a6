"""Metrics of predictions on one part of a client's data: AUROC, F1, balanced accuracy, class accuracy, calibration.

Only classes that the part has examples of count, and AUROC, F1 and balanced accuracy are their plain means ("macro").
Where the labels leave a score undefined, there is no value; means over clients then leave the client out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.core.options import option
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


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy(OfPredictions):
    """`accuracy_class_C`: the share of the examples of class C that are recognised; none for a class without examples.

    It shows the classes that a client's model has forgotten. `balanced_accuracy` is the mean over the classes.
    """

    higher_is_better = True

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        classes = logits.shape[1]
        counts = torch.bincount(y, minlength=classes)
        hits = torch.bincount(y[logits.argmax(1) == y], minlength=classes)
        for c in counts.nonzero().flatten().tolist():
            yield Value(f"accuracy_class_{c}", float(hits[c] / counts[c]), int(counts[c]))


@dataclass(frozen=True, kw_only=True)
class Ece(OfPredictions):
    """`ece`: the expected calibration error, in [0, 1].

        ECE = Σ_b |B_b| / n · |accuracy(B_b) − confidence(B_b)|

    over bins B_b of equal width of the confidence, which is the largest softmax probability. A bin includes its upper
    edge (Guo et al. 2017, "On Calibration of Modern Neural Networks", Eq. 3).
    """

    higher_is_better = False

    bins: int = option(15, low=1, help="number of equally wide bins of the confidence")

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        confidence, prediction = logits.double().softmax(1).max(1)
        bin_index = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        gap = (prediction == y).double() - confidence
        sums = torch.zeros(self.bins, dtype=torch.float64, device=logits.device).index_add(0, bin_index, gap)
        yield Value("ece", float(sums.abs().sum()) / len(y), len(y))
