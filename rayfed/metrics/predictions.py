"""Metrics of predictions on one part of a client's data: of classes, of several labels, and of numbers.

Means over classes or labels are plain ("macro"), over those that the part has examples of. Where the data leave a score
undefined, it has no value, and means over clients leave that client out. In segmentation and other tasks with classes
at every position, every position counts as an example.

torchmetrics has most of these metrics. Those here are faster, need no import of two seconds, and `auroc` ranks logits,
while torchmetrics ranks their sigmoids, which round to 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.core.options import option
from rayfed.core.outputs import Kind
from rayfed.metrics.base import OF_CLASSES, OfPredictions, Value


def _ranks(values: np.ndarray, method: str = "average") -> Any:
    """Return the ranks in each column of `values` [n, k], from 1."""
    from scipy.stats import rankdata  # takes half a second

    return rankdata(values, method, axis=0)


class Ranking(OfPredictions):
    """Base class of metrics that depend on the order of scores alone.

    With two classes, the scores are those of class 1. Otherwise the value is the mean over classes, each against the
    rest by its softmax probability, or the mean over labels.
    """

    higher_is_better = True
    kinds: ClassVar[tuple[Kind, ...]] = (*OF_CLASSES, "labels")
    name: ClassVar[str]
    needs_others: ClassVar[bool] = False
    """Whether a class needs examples of other classes besides its own."""

    def of_scores(self, scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
        """Return k values, each from a column of `scores` [n, k] and of `positive` [n, k], which marks one class."""
        raise NotImplementedError

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        scores, is_class = self.columns(logits.double(), y)
        positive = is_class.cpu().numpy()
        defined = positive.any(0)
        if self.needs_others:
            defined &= ~positive.all(0)
        if defined.any():
            ranked = scores.cpu().numpy()
            values = self.of_scores(ranked[:, defined], positive[:, defined])
            yield Value(self.name, float(values.mean()), len(y))

    def columns(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores [n, k] of class 1, of each class or of each label, and whether y has them, bool [n, k]."""
        if y.ndim == 2:
            return logits, y == 1
        classes = torch.arange(logits.shape[1], device=y.device)
        if len(classes) == 2:
            return logits[:, 1:] - logits[:, :1], y[:, None] == classes[1:]
        return logits.softmax(1), y[:, None] == classes


class Auroc(Ranking):
    """`auroc`: the area under the ROC curve; with more than two classes or several labels, the mean over them.

    It is the Mann-Whitney statistic. Pair each example of the class with each other example: the area is the share of
    pairs in which the first has the higher score; ties count half. A part with a single class has no value.
    """

    name = "auroc"
    needs_others = True

    def of_scores(self, scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
        count = positive.sum(0)
        others = len(scores) - count
        lowest = count * (count + 1) / 2
        ranks = (_ranks(scores) * positive).sum(0)
        return np.asarray((ranks - lowest) / (count * others))


class AveragePrecision(Ranking):
    """`average_precision`: the precision at the score of an example of class 1, as a mean over these examples; with
    more than two classes or several labels, the mean over them. A part without such examples has no value."""

    name = "average_precision"

    def of_scores(self, scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
        of_class = np.where(positive, -scores, np.inf)
        hits = _ranks(of_class, method="max")  # of the class, at this score or above
        found = _ranks(-scores, method="max")
        precision = np.where(positive, hits / found, 0)
        return np.asarray(precision.sum(0) / positive.sum(0))


class MeanOverClasses(OfPredictions):
    """Base class of means over classes of a score that follows from three counts of each class."""

    higher_is_better = True
    name: ClassVar[str]

    def of_classes(self, hits: Tensor, predicted: Tensor, examples: Tensor) -> Tensor:
        """Return the scores [classes] from how many examples of a class are recognised, are predicted, and exist.

        The mean leaves out classes with NaN.
        """
        raise NotImplementedError

    def leaves_out_first(self, classes: int) -> bool:
        """Return whether the mean leaves out class 0."""
        return False

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        hits, predicted, examples = counts_of_classes(logits, y)
        present = examples > 0
        if y.ndim == 1 and self.leaves_out_first(logits.shape[1]):
            present[0] = False
        scores = self.of_classes(hits, predicted, examples)[present]
        defined = scores[~scores.isnan()]
        if len(defined):
            yield Value(self.name, float(defined.mean()), len(y))


def counts_of_classes(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many examples of each class are recognised, are predicted, and exist: float64 [classes].

    With several labels, both arguments are [n, labels], and a label counts as a class.
    """
    if y.ndim == 2:
        predicts = logits > 0
        hits = predicts & (y == 1)
        return hits.sum(0).double(), predicts.sum(0).double(), y.sum(0).double()
    classes = logits.shape[1]
    prediction = logits.argmax(1)

    def count(of: Tensor) -> Tensor:
        return torch.bincount(of, minlength=classes).double()

    return count(y[prediction == y]), count(prediction), count(y)


class F1(MeanOverClasses):
    """`f1`: the F1 score 2 TP / (2 TP + FP + FN) of class 1 if there are two classes, else the mean over classes or
    labels.

    With two classes, a part without examples of class 1 has no value.
    """

    name = "f1"
    kinds = (*OF_CLASSES, "labels")

    def leaves_out_first(self, classes: int) -> bool:
        return classes == 2

    def of_classes(self, hits: Tensor, predicted: Tensor, examples: Tensor) -> Tensor:
        return 2 * hits / (predicted + examples)


@dataclass(frozen=True, kw_only=True)
class Dice(F1):
    """`dice`: the overlap 2 TP / (2 TP + FP + FN) over all positions of the part, as a mean over classes from 1 on."""

    name = "dice"

    background: bool = option(False, help="count class 0, the background, as well")

    def leaves_out_first(self, classes: int) -> bool:
        return not self.background


class MeanIou(MeanOverClasses):
    """`mean_iou`: intersection over union TP / (TP + FP + FN) of all positions of the part, as a mean over classes."""

    name = "mean_iou"

    def of_classes(self, hits: Tensor, predicted: Tensor, examples: Tensor) -> Tensor:
        return hits / (predicted + examples - hits)


class BalancedAccuracy(MeanOverClasses):
    """`balanced_accuracy`: the share of a class's examples that are recognised, as a mean over classes."""

    name = "balanced_accuracy"

    def of_classes(self, hits: Tensor, predicted: Tensor, examples: Tensor) -> Tensor:
        return hits / examples


class ClassAccuracy(OfPredictions):
    """`accuracy_class_C`: the share of the examples of class C that are recognised; none for a class without examples.

    It shows the classes that a client's model has forgotten. `balanced_accuracy` is the mean over the classes.
    """

    higher_is_better = True

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        classes = logits.shape[1]
        recognised = y[logits.argmax(1) == y]
        counts = torch.bincount(y, minlength=classes)
        hits = torch.bincount(recognised, minlength=classes)
        shares = hits / counts
        for c in counts.nonzero().flatten().tolist():
            yield Value(f"accuracy_class_{c}", float(shares[c]), int(counts[c]))


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
        number = (confidence * self.bins).ceil().long()
        bins = number.clamp(1, self.bins) - 1
        gaps = (prediction == y).double() - confidence
        sums = torch.zeros(self.bins, dtype=torch.float64, device=logits.device)
        sums = sums.index_add(0, bins, gaps)
        ece = float(sums.abs().sum()) / len(y)
        yield Value("ece", ece, len(y))


class Perplexity(OfPredictions):
    """`perplexity`: e to the mean negative log-probability, in nats, of the classes at the positions of the part."""

    higher_is_better = False

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        mean = F.cross_entropy(logits, y).double()
        yield Value("perplexity", float(mean.exp()), len(y))


class OfErrors(OfPredictions):
    """Base class of metrics of numbers."""

    higher_is_better = False
    kinds: ClassVar[tuple[Kind, ...]] = ("numbers",)


class Mae(OfErrors):
    """`mae`: the mean absolute error over all numbers of the part."""

    def measure(self, outputs: Tensor, y: Tensor) -> Iterable[Value]:
        errors = outputs.double() - y
        yield Value("mae", float(errors.abs().mean()), len(y))


class Rmse(OfErrors):
    """`rmse`: the square root of the mean squared error over all numbers of the part."""

    def measure(self, outputs: Tensor, y: Tensor) -> Iterable[Value]:
        errors = outputs.double() - y
        mean = errors.square().mean()
        yield Value("rmse", float(mean.sqrt()), len(y))


class R2(OfErrors):
    """`r2`: the share of the variance that is explained, 1 − Σ (y − o)² / Σ (y − ȳ)², as a mean over the numbers of an
    example. A number that is the same in all examples of the part is left out."""

    higher_is_better = True

    def measure(self, outputs: Tensor, y: Tensor) -> Iterable[Value]:
        predicted = outputs.double().reshape(len(y), -1)
        targets = y.double().reshape(len(y), -1)
        varies = (targets != targets[:1]).any(0)
        if varies.any():
            residuals = (predicted - targets).square().sum(0)
            spread = (targets - targets.mean(0)).square().sum(0)
            explained = 1 - residuals / spread
            yield Value("r2", float(explained[varies].mean()), len(y))
