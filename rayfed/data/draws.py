"""Seeded random generators for everything that data and partitions draw, and the rounding of shares."""

import numpy as np


def numpy_generator(seed: int | None, *purpose: int) -> np.random.Generator:
    """Return numpy's PCG64 generator for a seed and a purpose, so that each purpose has its own stream; None is 0."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed or 0, *purpose])))


def floor_share(size: int, fraction: float) -> int:
    """Return `size` x `fraction` rounded down, tolerating float error such as 0.29 x 100 = 28.999999999999996."""
    return int(size * fraction + 1e-9)
