"""Accuracy on each class, which shows the classes that a client's model has forgotten."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.metrics.base import OfPredictions, Value


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy(OfPredictions):
    """`accuracy_class_C`: the share of the examples of class C that are recognised; none for a class without examples.

    `accuracy_balanced`: the mean over the classes that have examples.
    """

    higher_is_better = True

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        classes = logits.shape[1]
        counts = torch.bincount(y, minlength=classes)
        hits = torch.bincount(y[logits.argmax(1) == y], minlength=classes)
        accuracies = {c: float(hits[c] / counts[c]) for c in counts.nonzero().flatten().tolist()}
        for c, accuracy in accuracies.items():
            yield Value(f"accuracy_class_{c}", accuracy, int(counts[c]))
        yield Value("accuracy_balanced", sum(accuracies.values()) / len(accuracies), len(y))
