"""Gradients that protect single records: Abadi et al. 2016, "Deep Learning with Differential Privacy", Alg. 1.

    g_j ← ∇ℓ(w; x_j, y_j) · min(1, C / ‖∇ℓ(w; x_j, y_j)‖)   for each record of a batch, over all weights together
    g ← (Σ_j g_j + N(0, σ²C²)) / B,   B the expected size of a batch

A `PrivateBatch` keeps its records to itself: all that a method gets from it is one such gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.core.batch import Batch
from rayfed.core.network import gradients, vectorised
from rayfed.core.trees import Weights

Loss = Callable[[Weights, Batch], tuple[Tensor, Weights]]
"""(the trained weights, a batch) -> (the mean loss, the network's next buffers)."""


class ReadsData(Exception):
    """A method looks at its clients' records otherwise than by one private gradient; the text follows its name."""


class PrivateBatch(NamedTuple):
    """A batch of which a method may take one private gradient, and nothing else.

    Attributes:
        taken: Whether a row is a record of the batch, bool [rows]; the others fill it up.
        inputs: Inputs [rows, ...], of at least one row.
        labels: Labels [rows, ...].
        noise: The noise on the sum of the gradients of each trained weight.
        clip: C, a scalar.
        expected: B, a scalar.
    """

    taken: Tensor
    inputs: Tensor
    labels: Tensor
    noise: Weights
    clip: Tensor
    expected: Tensor

    @property
    def x(self) -> Tensor:
        raise ReadsData("computes with the inputs of a batch outside of the gradient that has noise")

    @property
    def y(self) -> Tensor:
        raise ReadsData("computes with the labels of a batch outside of the gradient that has noise")


@dataclass
class PrivateStep:
    """What a step has taken from its batch: the mean loss, which is recorded and which no method sees."""

    loss: Tensor | None = None


_present: PrivateStep | None = None


@contextmanager
def private_step() -> Iterator[PrivateStep]:
    """Mark a step, in which one private gradient may be taken."""
    global _present
    before = _present
    _present = PrivateStep()
    try:
        yield _present
    finally:
        _present = before


def batch_gradients(loss: Loss, trained: Weights, batch: Batch | PrivateBatch) -> tuple[Weights, Tensor, Weights]:
    """Differentiate `loss` on a batch with respect to the weights `trained`.

    Returns:
        The gradients, the loss and the network's next buffers; of a private batch the private gradients, 0 and nothing.
    """
    if isinstance(batch, PrivateBatch):
        return private_gradients(loss, trained, batch), torch.zeros((), device=batch.expected.device), {}
    return gradients(lambda weights: loss(weights, batch), trained)


def private_gradients(loss: Loss, trained: Weights, batch: PrivateBatch) -> Weights:
    """Return the private gradients of a mean over examples with respect to the weights `trained`.

    Raises:
        ReadsData: The step has taken a gradient of this batch already, or trains a weight without noise.
    """
    step = _present
    assert step is not None, "a private gradient belongs to a private step"
    if step.loss is not None:
        raise ReadsData("takes several gradients of one batch")
    for name in trained:
        if name not in batch.noise:
            raise ReadsData(f"trains {name}, which is no weight of the model")

    def of_record(x: Tensor, y: Tensor) -> tuple[Weights, Tensor]:
        alone = Batch(x.unsqueeze(0), y.unsqueeze(0))
        derived = torch.func.grad_and_value(lambda weights: loss(weights, alone), has_aux=True)
        found, (value, _) = derived(trained)
        return found, value.detach()

    with vectorised():
        each, losses = torch.vmap(of_record, randomness="different")(batch.inputs, batch.labels)
    factors = _clipping_factors(list(each.values()), batch)
    step.loss = torch.where(batch.taken, losses, 0).sum() / batch.taken.sum().clamp(min=1)
    found = {}
    for name, of_records in each.items():
        total = torch.tensordot(factors.to(of_records.dtype), of_records, dims=1)
        found[name] = (total + batch.noise[name]) / batch.expected
    return found


def _clipping_factors(each: Sequence[Tensor], batch: PrivateBatch) -> Tensor:
    """Return min(1, C / norm) for each record [rows]; 0 for rows that fill up the batch."""
    norms = []
    for of_records in each:
        norms.append(torch.linalg.vector_norm(of_records.flatten(1), dim=1))
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors = (batch.clip / norm).clamp(max=1)
    return torch.where(batch.taken, factors, 0)


def filled_up(batch: PrivateBatch, rows: int) -> PrivateBatch:
    """Return a batch of at least so many rows, in which copies of the first row follow, which do not count."""
    missing = rows - len(batch.taken)
    if missing <= 0:
        return batch
    inputs = torch.cat([batch.inputs, _copies(batch.inputs, missing)])
    labels = torch.cat([batch.labels, _copies(batch.labels, missing)])
    taken = torch.cat([batch.taken, batch.taken.new_zeros(missing)])
    return batch._replace(taken=taken, inputs=inputs, labels=labels)


def _copies(column: Tensor, count: int) -> Tensor:
    """Return `count` copies of the first row."""
    first = column[:1]
    return first.expand(count, *first.shape[1:])


def of_one_size(batches: Sequence[Any]) -> list[Any]:
    """Return batches of clients that train together; private ones are filled up to the size of the largest."""
    rows = 0
    for batch in batches:
        if isinstance(batch, PrivateBatch):
            rows = max(rows, len(batch.taken))
    filled = []
    for batch in batches:
        if isinstance(batch, PrivateBatch):
            batch = filled_up(batch, rows)
        filled.append(batch)
    return filled
