"""The few examples with which a plan tries models and losses."""

import numpy as np
import torch

from rayfed.core.layout import Layout
from rayfed.core.task import Batch
from rayfed.data.population import Examples, Population


def input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0].copy()).dtype  # it may be read-only
    if dtype == torch.uint8:
        return torch.float32
    return dtype


def largest_part(population: Population) -> Examples:
    """Return the training examples of the client with the most."""
    return population.clients[int(population.clients.train_sizes().argmax())].train


def first_batch(part: Examples, count: int) -> Batch:
    """Return the first `count` examples of a part in the type in which they reach the model; pixels stay 0 to 255."""
    x = torch.from_numpy(part.x[:count].copy())
    y = torch.from_numpy(part.y[:count].copy())
    if x.dtype == torch.uint8:
        x = x.float()
    return Batch(x, y)


def extreme_examples(population: Population) -> np.ndarray:
    """Return the examples with the smallest and the largest input at each position, those of test sets included."""
    extremes = np.zeros((0, *population.shape), population.clients[0].train.dtype)
    for part in population.examples():
        for block in part.blocks():
            extremes = _extremes_of(np.concatenate([extremes, block]), population.layout)
    return extremes


def _extremes_of(candidates: np.ndarray, layout: Layout | None) -> np.ndarray:
    """Return those of some examples that have the smallest or the largest input at a position."""
    if layout:
        flat = layout.integers(candidates)
    else:
        flat = candidates.reshape(len(candidates), -1)
    if not flat.size:
        return candidates[:2]
    chosen = np.unique([flat.argmin(0), flat.argmax(0)])
    extremes: np.ndarray = candidates[chosen]
    return extremes
