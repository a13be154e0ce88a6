"""What to do about inputs that a model cannot take, and labels that a loss cannot take: the end of an error message."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXACT = 2**24  # up to here float32 holds all whole numbers


def remedy_for_inputs(module: nn.Module, x: Tensor) -> str:
    """Return what to do if `module` fails on inputs `x` [n, ...], by the types of both; empty: their types fit."""
    kinds = {value.dtype for value in module.parameters() if value.is_floating_point()}
    others = kinds - {torch.float32}
    if x.is_floating_point():
        if not others:
            return ""
        return f"its weights are {_names(others)}, and rayfed computes in float32: make it with .float() at the end"
    if x.dtype == torch.bool:
        return "give them as float32, by x.astype('float32')"
    if x.ndim > 3:
        scaled = "(x / x.max()).astype('float32') with one maximum for all clients"
        return f"images of other types than uint8 are not scaled: give float32, such as {scaled}"
    highest = 0
    if x.numel():
        highest = int(x.max())
    if highest > EXACT:
        return "subtract the first of times, or number codes from 0, and give them as float32"
    vocabulary = ""
    if highest:
        vocabulary = f", as one with model.vocabulary={highest + 1}"
    return f"give numbers as float32; an embedding of n takes 0 to n - 1{vocabulary}"


def _names(kinds: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def is_one_hot(labels: Any) -> bool:
    """Return whether labels [n, classes], an array or a tensor, have a single 1 in each row and otherwise 0."""
    if labels.ndim != 2 or labels.shape[1] < 2:
        return False
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())


def reason_of_loss(loss: Callable[..., Any], outputs: Tensor, labels: Tensor) -> str:
    """Return why `loss` fails on outputs [n, classes, ...] and labels, with what to do; empty: it is not known."""
    if labels.shape == outputs.shape and not labels.is_floating_point() and is_one_hot(labels):
        return "labels are one-hot, and it takes classes [n]: give y.argmax(1)"
    if isinstance(loss, functools.partial):
        options = loss.keywords
    else:
        options = {"weight": getattr(loss, "weight", None)}
    weight = options.get("weight")
    is_vector = isinstance(weight, (list, tuple)) or (isinstance(weight, Tensor) and weight.ndim == 1)
    if weight is not None and is_vector and outputs.ndim > 1 and len(weight) != outputs.shape[1]:
        return f"has {len(weight)} class weights, and the model has {outputs.shape[1]} outputs: give one for each class"
    return ""
