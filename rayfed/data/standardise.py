"""Standardised columns: each number less the mean of its column, divided by the standard deviation, of training rows.

The rows that a partition gives to validation and test parts play no part, and neither do those of unseen clients.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.data.population import Examples, PooledExamples, Population, TestSet

Kind = Literal["client", "global"]


@dataclass(frozen=True)
class Standardisation:
    """How the inputs of a population were standardised: (x - mean) / scale.

    Attributes:
        kind: "global": by the training rows of all participants; "client": those of each client by its own.
        mean, scale: Of the rows of all participants, float32 [columns] each. Test sets of the server always have these.
        means, scales: Of each client by its number in the source of the examples, float32 [clients, columns]; with
            "global", those of all participants again.
    """

    kind: Kind
    mean: np.ndarray
    scale: np.ndarray
    means: np.ndarray
    scales: np.ndarray

    def of(self, number: int | None) -> "Standardise":
        """Return the layer that standardises inputs as those of a client were; None: those of the server."""
        if number is None:
            return Standardise(self.mean, self.scale)
        return Standardise(self.means[number], self.scales[number])


class Standardise(nn.Module):
    """A layer that standardises inputs [n, columns]."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: np.ndarray, scale: np.ndarray):
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(mean.copy()))
        self.register_buffer("scale", torch.from_numpy(scale.copy()))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def standardised(population: Population, kind: Kind) -> Population:
    """Return `population` with standardised inputs.

    Raises:
        UsageError: Inputs are no columns of numbers.
    """
    source = population.clients.source
    if population.layout is not None or not isinstance(source, PooledExamples):
        raise _no_columns(population, kind, f"of several parts ({population.layout})")
    x = source.pool.x
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim != 2:
        raise _no_columns(population, kind, f"{x.dtype} {list(x.shape[1:])}, as of images or texts")
    numbers = population.participants.numbers
    rows = [x[_training_rows(source, int(number))] for number in numbers]
    mean, scale = _moments(np.concatenate(rows))
    count = len(source.bounds) // 3
    means = np.repeat(mean[None], count, axis=0)
    scales = np.repeat(scale[None], count, axis=0)
    if kind == "client":
        for number in range(count):
            means[number], scales[number] = _moments(x[_training_rows(source, number)])
    by = Standardisation(kind, mean, scale, means, scales)
    return replace(
        population,
        clients=population.clients.with_source(_standardised_source(source, by)),
        tests=tuple(_standardised_test(test, by) for test in population.tests),
        standardisation=by,
    )


def _no_columns(population: Population, kind: Kind, form: str) -> UsageError:
    return UsageError(
        f"data.standardize={kind}: takes columns of numbers, and the inputs of {population.name} are {form}; leave it "
        "out (data.mean and data.std normalise images)"
    )


def _training_rows(source: PooledExamples, number: int) -> slice:
    start, end = source.bounds[3 * number : 3 * number + 2].tolist()
    return slice(start, end)


def _moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means and the standard deviations of columns, float32; 1 for a column of equal numbers."""
    mean = rows.mean(0, dtype=np.float64)
    scale = rows.std(0, dtype=np.float64)
    scale[scale == 0] = 1.0
    return mean.astype(np.float32), scale.astype(np.float32)


def _standardised_source(source: PooledExamples, by: Standardisation) -> PooledExamples:
    x = np.empty_like(source.pool.x)
    for number in range(len(by.means)):
        first = 3 * number  # of the parts of a client
        start = int(source.bounds[first])
        end = int(source.bounds[first + 3])
        rows = slice(start, end)
        x[rows] = (source.pool.x[rows] - by.means[number]) / by.scales[number]
    return replace(source, pool=replace(source.pool, x=x))


def _standardised_test(test: TestSet, by: Standardisation) -> TestSet:
    examples: Examples = test.examples
    x = (np.asarray(examples.x) - by.mean) / by.scale
    return replace(test, examples=replace(examples, x=x.astype(np.float32)))
