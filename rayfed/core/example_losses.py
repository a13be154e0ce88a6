"""Cross-entropy of each example, where a loss is known to be a mean of them: many clients are then scored at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OPTIONS = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}


class ExampleLosses(NamedTuple):
    """The loss of each example, float64 [n], and its weight in the mean [n]: the mean loss is Σ losses / Σ weights."""

    losses: Tensor
    weights: Tensor


def example_losses(loss: Callable[..., Tensor], logits: Tensor, y: Tensor) -> ExampleLosses | None:
    """Return the loss of each example by its `logits` [n, classes] and class `y` [n].

    None where `loss` is not torch's cross-entropy, or takes no classes here.
    """
    options = _options_for_classes(loss, logits, y)
    if options is None:
        return None
    losses = F.cross_entropy(logits, y, **(options | {"reduction": "none"}))
    weights = (y != options["ignore_index"]).double()
    of_classes = options["weight"]
    if of_classes is not None:
        weights = weights * of_classes.double()[y.clamp(min=0)]
    return ExampleLosses(losses.double(), weights)


def has_example_losses(loss: Callable[..., Tensor], logits: Tensor, y: Tensor) -> bool:
    """Return whether `example_losses` returns losses; nothing is computed."""
    return _options_for_classes(loss, logits, y) is not None


def _options_for_classes(loss: Callable[..., Tensor], logits: Tensor, y: Tensor) -> dict[str, Any] | None:
    """Return all options of the cross-entropy that `loss` is, if it is one and a mean over classes `y` [n]."""
    if logits.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return None
    options = _options(loss, logits)
    if options is None or set(options) - set(_OPTIONS):
        return None
    options = _OPTIONS | options
    if options["reduction"] != "mean":
        return None
    return options


def _options(loss: Callable[..., Tensor], logits: Tensor) -> dict[str, Any] | None:
    """Return the options of the cross-entropy that `loss` is; None if it is none."""
    if isinstance(loss, functools.partial):
        inner = _options(loss.func, logits)
        if inner is None or loss.args:
            return None
        return inner | loss.keywords
    if loss is F.cross_entropy:
        return {}
    if type(loss) is nn.CrossEntropyLoss:
        return {name: getattr(loss, name) for name in _OPTIONS}
    named = getattr(type(loss), "options_for", None)
    if named is None or not type(loss).__module__.startswith("rayfed."):
        return None
    own: dict[str, Any] = named(loss, logits)
    return own


def sums_of_parts(values: Tensor, lengths: list[int]) -> Tensor:
    """Return the sum over each of consecutive parts of `values` [n, k] with these lengths: [parts, k].

    The bits of a sum depend on the values of its part alone.
    """
    if max(lengths) <= _LONG:
        return _sums_of_short(values, lengths)
    parts = values.split(lengths)
    sums: dict[int, Tensor] = {}
    short = []
    for place, part in enumerate(parts):
        if len(part) > _LONG:
            sums[place] = part.sum(0)
        else:
            short.append(place)
    if short:
        together = torch.cat([parts[place] for place in short])
        sums_of_short = _sums_of_short(together, [lengths[place] for place in short])
        sums |= zip(short, sums_of_short.unbind(), strict=True)
    return torch.stack([sums[place] for place in range(len(parts))])


def _sums_of_short(values: Tensor, lengths: list[int]) -> Tensor:
    """Return the sums of parts in one operation."""
    on_device = torch.tensor(lengths).to(values.device, non_blocking=True)
    return torch.segment_reduce(values, "sum", lengths=on_device, axis=0, unsafe=True)


_LONG = 256  # examples of a part, from which on a sum of its own is faster: a GPU sums each part in one thread
