"""Pseudo-data made of means of images, so that no single image leaves its client (FedDebias, Alg. 2)."""

from typing import Any

import torch
from torch import Tensor


def draw_owners(cohort: tuple[int, ...], count: int) -> Tensor:
    """For each of `count` means the client that makes it, drawn uniformly; torch's generator."""
    return torch.tensor(cohort, dtype=torch.int32)[torch.randint(len(cohort), (count,))]


def sample_means(part: Any, count: int, size: int) -> Tensor:
    """`count` means [count, *shape] of `size` random examples of `part` (all of them if it has fewer)."""
    size = min(size, len(part))
    rows = torch.cat([torch.randperm(len(part))[:size] for _ in range(count)])
    return torch.stack([batch.x.mean(0) for batch in part.batches(size, rows)])
