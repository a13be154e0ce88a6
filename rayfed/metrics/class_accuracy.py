"""Accuracy class by class: which classes a client's model has forgotten."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.metrics.base import OfPredictions, Value


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy(OfPredictions):
    """`accuracy_class_C`: the share of the examples of class C that are recognised; no value for a class without any.

    `accuracy_balanced`: the mean over the classes that the data have.
    """

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        classes = logits.shape[1]
        counts = torch.bincount(y, minlength=classes)
        hits = torch.bincount(y[logits.argmax(1) == y], minlength=classes)
        found = [(c, float(hits[c] / counts[c]), int(counts[c])) for c in counts.nonzero().flatten().tolist()]
        for c, share, count in found:
            yield Value(f"accuracy_class_{c}", share, count)
        yield Value("accuracy_balanced", sum(share for _, share, _ in found) / len(found), len(y))
