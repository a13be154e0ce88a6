"""The meaning of a model's outputs, which decides how they are scored beside their loss.

- "classes": an output [classes] per example; the largest is the predicted class. The loss is cross-entropy, or another
  loss of classes: labels are whole numbers from 0. From equal outputs, a step down the gradient raises the output of
  the example's own class most.
- "binary": one output per example, the logit of class 1 against class 0; class 1 is predicted if it is positive. All
  labels are 0 or 1. Wherever the outputs are, a step down the gradient raises those of 1 and lowers those of 0. So does
  `binary_cross_entropy_with_logits`, inside any function and with any class weights.
- "positions": the same at every position of an example. Outputs are [classes, ...] or [..., classes], and labels [...].
  Or there is a logit for each of the labels 0 and 1 of a mask, which has two axes or more.
- "labels": a logit for each of several labels [labels] of 0 and 1.
- "numbers": as many outputs as labels. The loss depends on their differences alone and grows with each of them: the
  squared, absolute or Huber error, for example. Labels are not all 0 and 1, unless they are floats.
- "survival": one output per example, its risk, and labels [event, time]: the event is 0 or 1. The loss depends on the
  order of the times alone and not on a number that is added to all outputs. From equal outputs, a step raises the risk
  of the first event and lowers that of the last patient without one. So does Cox's partial likelihood.
- "unknown": anything else, such as soft labels, several outputs per number, and probabilities in place of a logit.

Losses are recognised by their values, since users write their own functions.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["classes", "binary", "positions", "labels", "numbers", "survival", "unknown"]

_MOST_CLASSES = 256  # that are tried
_MOST_VALUES = 2**22  # in the outputs of a batch that is tried
_LOGITS = (-2.0, 0.5, 3.0)


class Outputs(NamedTuple):
    """What the outputs of a model stand for.

    Attributes:
        kind: One of the kinds above.
        axis: The axis of the classes among those of a batch; None for the logits of a mask.
        ignored: The label of the examples or positions that are left out of every score; None if there are none.
    """

    kind: Kind = "classes"
    axis: int | None = 1
    ignored: int | None = None


CLASSES = Outputs()
UNKNOWN = Outputs("unknown")


def scored_values(outputs: Outputs, values: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return outputs of a model and labels in the form in which metrics take them; None if they stand for nothing.

    Returns:
        (logits [m, classes], classes [m]) of the m examples or positions that count, (logits [n, k], zeros and ones
        [n, k]) of several labels, (numbers, numbers) of the labels' shape, or (risks [n], events and times [n, 2]).
    """
    kind, axis, ignored = outputs
    if kind == "unknown":
        return None
    if kind == "survival":
        return values.reshape(len(y)), y
    if kind in ("labels", "numbers"):
        if kind == "labels":
            y = y.long()
        return values.reshape(y.shape), y
    if kind == "binary" or axis is None:
        logit = values.reshape(-1)
        values = torch.stack([torch.zeros_like(logit), logit], 1)
        y = y.reshape(-1).long()
    elif kind == "positions":
        classes = values.shape[axis]
        values = values.movedim(axis, -1).reshape(-1, classes)
        y = y.reshape(-1)
    if ignored is not None:
        counts = y != ignored
        values = values[counts]
        y = y[counts]
    return values, y


def labels_without_loss(loss: Callable[..., Any], outputs: Outputs) -> tuple[int, ...]:
    """Return the labels that `loss` leaves out of its mean: the ignored one, and classes of weight 0."""
    if isinstance(loss, functools.partial):
        options = loss.keywords
    else:
        options = {"weight": getattr(loss, "weight", None)}
    weight = options.get("weight")
    classes = []
    if isinstance(weight, Tensor) and weight.ndim == 1:
        classes = (weight == 0).nonzero().flatten().tolist()
    ignored = []
    if outputs.ignored is not None:
        ignored = [outputs.ignored]
    return (*ignored, *classes)


def with_loss(y: Tensor, without: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return labels [n, ...], some of them with a loss, and whether any label of `y` has one, a scalar.

    Labels that are all among `without` are replaced by a class. Their mean loss would be 0 / 0.
    """
    if not without:
        return y, torch.ones((), dtype=torch.bool, device=y.device)
    has_loss = labels_with_loss(y, without)
    other = 0
    while other in without:
        other += 1
    return torch.where(has_loss.any(), y, other), has_loss.any()


def labels_with_loss(y: Tensor, without: Sequence[int]) -> Tensor:
    """Return which of the labels `y` [n, ...] are not among `without`, as truth values of the same shape."""
    has_loss = torch.ones_like(y, dtype=torch.bool)
    for label in without:
        has_loss = has_loss & (y != label)
    return has_loss


def meaning_of_outputs(loss: Callable[..., Any], shape: Sequence[int], labels: Sequence[np.ndarray]) -> Outputs:
    """Return the meaning of a model's outputs.

    Args:
        loss: (outputs [n, *shape], y [n, ...]) -> mean over the batch.
        shape: Shape of the output for one example.
        labels: The labels of all examples, in parts [n, ...] of one type.
    """
    labels = [y for y in labels if y.size]
    shape = tuple(shape)
    if not labels:
        return UNKNOWN
    form = labels[0].shape[1:]
    dtype = torch.from_numpy(labels[0][:0]).dtype
    is_integer = not dtype.is_floating_point
    is_bits = all(map(_are_bits, labels))
    axes: set[int] = set()
    if is_integer and len(shape) == len(form) + 1:
        axes = {1, len(shape)}
    for axis in sorted(axes):
        if (*shape[: axis - 1], *shape[axis:]) == form:
            found = _of_classes(loss, shape, axis, labels)
            if found is not None:
                return found
    if form == (2,) and math.prod(shape) == 1 and are_survival(labels):
        if _orders_risks(loss, shape, dtype):
            return Outputs("survival", axis=None)
        return UNKNOWN
    if math.prod(shape) != math.prod(form):
        return UNKNOWN
    if is_bits and _separates_bits(loss, shape, form, dtype):
        if shape in ((), (1,)) and len(form) < 2:
            return Outputs("binary")
        kind: Kind = "positions"
        if len(form) == 1:
            kind = "labels"
        return Outputs(kind, axis=None)
    if (dtype.is_floating_point or not is_bits) and _grows_with_differences(loss, shape, form, dtype):
        return Outputs("numbers", axis=None)
    return UNKNOWN


def _are_bits(labels: np.ndarray) -> bool:
    """Return whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def _of_classes(
    loss: Callable[..., Any], shape: tuple[int, ...], axis: int, labels: Sequence[np.ndarray]
) -> Outputs | None:
    """Return the meaning of outputs whose `axis` has the classes; None if labels or loss are not those of classes."""
    kind: Kind = "classes"
    if len(shape) > 1:
        kind = "positions"
    classes = shape[axis - 1]
    outside = _labels_outside(labels, classes)
    function = loss
    if isinstance(loss, functools.partial):
        function = loss.func
    is_cross_entropy = function is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
    if axis == 1 and (is_cross_entropy or hasattr(loss, "ignore_index")):
        index = _options_of(loss).get("ignore_index", -100)
        if outside and outside != [index]:
            return None
        if is_cross_entropy and any((y == index).any() for y in labels):
            return Outputs(kind, axis, index)
        if is_cross_entropy:
            return Outputs(kind, axis, None)
    if len(outside) > 1 or classes < 2:
        return None
    ignored = _ignored_by_gradient(loss, shape, axis, classes, outside)
    if ignored is False:
        return None
    return Outputs(kind, axis, ignored)


def _options_of(loss: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the options of a loss: those that a `partial` gives, else its attributes."""
    if isinstance(loss, functools.partial):
        return loss.keywords
    return vars(loss)


def _labels_outside(labels: Sequence[np.ndarray], classes: int) -> list[int]:
    """Return the different labels that are none of 0 to `classes` - 1, in ascending order."""
    lowest = min(y.min() for y in labels)
    highest = max(y.max() for y in labels)
    if lowest >= 0 and highest < classes:
        return []
    parts = []
    for y in labels:
        parts.append(y[(y < 0) | (y >= classes)])
    outside: list[int] = np.unique(np.concatenate(parts)).tolist()
    return outside


def _ignored_by_gradient(
    loss: Callable[..., Any], shape: tuple[int, ...], axis: int, classes: int, outside: Sequence[int]
) -> int | Literal[False] | None:
    """Return the label without a gradient, None if all have one; False if `loss` is none of classes.

    From equal outputs, descending a loss of classes raises the output of the own class most.
    """
    positions = math.prod(shape) // classes
    for_all_classes = -(-min(classes, _MOST_CLASSES) // positions)
    within_memory = max(1, _MOST_VALUES // math.prod(shape))
    count = max(for_all_classes, min(8, within_memory))
    order = torch.randperm(count * positions, generator=torch.Generator().manual_seed(0))
    y = order % classes
    if outside:
        y[order % 4 == 0] = outside[0]
    labels = y.reshape(count, *shape[: axis - 1], *shape[axis:])
    (gradient,) = _gradients(loss, (count, *shape), [0.0], labels)
    if gradient is None:
        return False
    gradient = gradient.movedim(axis, -1).reshape(-1, classes)
    without = (gradient == 0).all(1)
    ignored = y[without].unique().tolist()
    if len(ignored) > 1 or ignored == y.unique().tolist():
        return False
    if outside and ignored != outside:
        return False
    if ignored and bool((y[~without] == ignored[0]).any()):
        return False
    values, predicted = (-gradient[~without]).topk(2)
    own = y[~without]
    is_own_first = (predicted[:, 0] == own).all()
    is_own_alone = (values[:, 0] > values[:, 1]).all()
    if not bool(is_own_first and is_own_alone):
        return False
    if ignored:
        return int(ignored[0])
    return None


def _separates_bits(
    loss: Callable[..., Any], shape: tuple[int, ...], form: tuple[int, ...], dtype: torch.dtype
) -> bool:
    """Return whether, from any outputs, descending `loss` raises those of the label 1 and lowers those of 0."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(2, (6, *form), generator=rng)
    # where one of them is all labels, a softmax over them has no gradient
    y[:2] = 0
    y[2:4] = 1
    signs = (2 * y - 1).reshape(6, *shape)
    gradients = _gradients(loss, signs.shape, _LOGITS, y.to(dtype))
    return all(_descends_towards(signs, gradient) for gradient in gradients)


def _descends_towards(signs: Tensor, gradient: Tensor | None) -> bool:
    """Return whether a step against the gradient moves every output in the direction of its sign."""
    if gradient is None:
        return False
    return bool((-gradient.sign() == signs).all())


def _grows_with_differences(
    loss: Callable[..., Any], shape: tuple[int, ...], form: tuple[int, ...], dtype: torch.dtype
) -> bool:
    """Return whether `loss` depends on the differences of outputs and labels alone, and grows with each of them."""
    rng = torch.Generator().manual_seed(0)
    y = (5 * torch.randn(4, *form, generator=rng)).round()
    sizes = torch.tensor([0.25, 0.5, 2.0, 4.0]).reshape(4, *[1] * len(shape))
    differences = torch.randn(4, *shape, generator=rng).sign() * sizes
    values = []
    for shift in (0, 3):
        given = y + shift
        outputs = given.reshape(4, *shape) + differences
        (gradient,) = _gradients(loss, (4, *shape), [outputs], given.to(dtype))
        if not _descends_towards(-differences.sign(), gradient):
            return False
        value = loss(outputs, given.to(dtype))
        values.append(float(value))
    return math.isclose(values[0], values[1], rel_tol=1e-3)


def are_survival(labels: Sequence[np.ndarray]) -> bool:
    """Return whether labels, in parts [n, 2], can be events, 0 or 1, and times from 0, some of which are not 1."""
    are_bits = True
    for part in labels:
        if part.ndim != 2 or part.shape[1] != 2:
            return False
        events, times = part.T
        if not _are_bits(events) or not (times >= 0).all():
            return False
        are_bits = are_bits and _are_bits(times)
    return not are_bits


def _orders_risks(loss: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether `loss` is one of survival, by four patients."""
    events = torch.tensor([0, 1, 1, 0])
    times = torch.tensor([4, 1, 3, 2])
    outputs = torch.tensor([0.5, -1.0, 2.0, 0.0]).reshape(4, *shape)
    y = torch.stack([events, times], 1).to(dtype)
    of_squares = torch.stack([events, times**2], 1).to(dtype)
    (at_zero,) = _gradients(loss, outputs.shape, [0.0], y)
    if at_zero is None:
        return False
    raised = -at_zero.flatten()
    moves_the_ends = float(raised[1]) > 0 > float(raised[0])
    keeps_the_sum = math.isclose(float(raised.sum()), 0, abs_tol=1e-5)
    value = _value(loss, outputs, y)
    shifted = _value(loss, outputs + 3, y)
    with_squares = _value(loss, outputs, of_squares)
    is_relative = math.isclose(value, shifted, rel_tol=1e-4)
    is_of_order = math.isclose(value, with_squares, rel_tol=1e-4)
    return moves_the_ends and keeps_the_sum and is_relative and is_of_order


def _value(loss: Callable[..., Any], outputs: Tensor, y: Tensor) -> float:
    """Return the value of a loss; NaN where it fails."""
    try:
        return float(loss(outputs, y))
    except Exception:  # a user's loss may raise anything
        return math.nan


def _gradients(
    loss: Callable[..., Any], shape: Sequence[int], starts: Sequence[float | Tensor], y: Tensor
) -> list[Tensor | None]:
    """Return the gradients of `loss` at outputs of `shape` that begin at each of `starts`; None where it fails."""
    gradients: list[Tensor | None] = []
    for start in starts:
        outputs = (torch.zeros(*shape) + start).requires_grad_()
        try:
            with torch.enable_grad():
                gradients += torch.autograd.grad(loss(outputs, y), outputs)
        except Exception:  # a user's loss may raise anything for outputs that it is not made for
            gradients.append(None)
    return gradients
