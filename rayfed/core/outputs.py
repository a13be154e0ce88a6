"""The meaning of a model's outputs, which decides whether and how they are scored beside their loss.

- "classes": an output [classes] per example; the largest is the predicted class. The loss is cross-entropy, or labels
  are whole numbers from 0 and, from equal outputs, a step down the gradient of the loss raises the output of the
  example's own class most.
- "binary": one output per example, the logit of class 1 against class 0; class 1 is predicted if it is positive. All
  labels are 0 or 1 and the loss is `binary_cross_entropy_with_logits`, inside any function and with any class weights.
- "unknown": anything else, such as regression, several labels or soft labels per example, labels such as -100 that mark
  examples to be ignored, outputs for every position of a sequence, and probabilities in place of a logit.

Losses are recognised by their values, since users write their own functions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outputs = Literal["classes", "binary", "unknown"]

_MOST_CLASSES = 256  # that are tried
_LOGITS = (-2.0, 0.5, 3.0)


def class_logits(outputs: Outputs, values: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return outputs of a model and labels as (logits [n, classes], classes [n]); None if they stand for no classes."""
    if outputs == "unknown":
        return None
    if outputs == "classes":
        return values, y
    logit = values.reshape(len(values))
    return torch.stack([torch.zeros_like(logit), logit], 1), y.reshape(len(y)).long()


def meaning_of_outputs(loss: Callable[..., Any], shape: Sequence[int], labels: Sequence[np.ndarray]) -> Outputs:
    """Return the meaning of a model's outputs.

    Args:
        loss: (outputs [n, *shape], y [n, ...]) -> mean over the batch.
        shape: Shape of the output for one example.
        labels: The labels of all examples, in parts [n, ...] of one type.
    """
    labels = [y for y in labels if len(y)]
    if not labels:
        return "unknown"
    low, high, first = min(y.min() for y in labels), max(y.max() for y in labels), labels[0]
    in_range = first.ndim == 1 and first.dtype.kind in "iu" and 0 <= low <= high < math.prod(shape)
    if len(shape) == 1 and in_range and (_is_cross_entropy(loss) or _raises_own_class(loss, shape[0])):
        return "classes"
    are_bits = first.shape[1:] in ((), (1,)) and all(np.isin(y, (0, 1)).all() for y in labels)
    return "binary" if tuple(shape) in ((), (1,)) and are_bits and _is_logistic(loss, shape, first) else "unknown"


def _is_cross_entropy(loss: Callable[..., Any]) -> bool:
    function = loss.func if isinstance(loss, functools.partial) else loss
    return function is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def _raises_own_class(loss: Callable[..., Any], classes: int) -> bool:
    """Return whether, from equal outputs, descending `loss` raises the output of each example's own class most."""
    if classes < 2:
        return False
    y = torch.arange(min(classes, _MOST_CLASSES))
    outputs = torch.zeros(len(y), classes, requires_grad=True)
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(outputs, y), outputs)
    except Exception:  # a user's loss may raise anything for outputs that it is not made for
        return False
    values, predicted = (-gradient).topk(2)
    return bool((predicted[:, 0] == y).all() and (values[:, 0] > values[:, 1]).all())


def _is_logistic(loss: Callable[..., Any], shape: Sequence[int], labels: np.ndarray) -> bool:
    """Return whether `loss` is binary cross-entropy of a logit, up to a constant factor for each class."""
    for label, sign in ((0, 1), (1, -1)):
        y = torch.full((2, *labels.shape[1:]), label, dtype=torch.from_numpy(labels[:0]).dtype)
        try:
            values = [float(loss(torch.full((2, *shape), logit), y)) for logit in _LOGITS]
        except Exception:  # as above
            return False
        ratio = torch.tensor(values) / F.softplus(sign * torch.tensor(_LOGITS))
        if not (ratio > 0).all() or not torch.allclose(ratio, ratio[0], rtol=1e-4):
            return False
    return True
