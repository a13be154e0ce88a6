"""Bit-for-bit comparison of weights."""

import torch

from rayfed.core.trees import Weights


def equal(a: Weights, b: Weights) -> bool:
    """Return whether two flat mappings of tensors have the same names and values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
