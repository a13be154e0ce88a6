"""Data made of means of examples, so that no single one leaves its client (FedDebias, Alg. 2; FedMix)."""

from typing import Any

import torch
from torch import Tensor

from rayfed.algorithms.common.soft_labels import soft
from rayfed.core.task import Batch


def draw_owners(cohort: tuple[int, ...], count: int) -> Tensor:
    """For each of `count` means the client that makes it, drawn uniformly; torch's generator."""
    return torch.tensor(cohort, dtype=torch.int32)[torch.randint(len(cohort), (count,))]


def sample_means(part: Any, count: int, size: int) -> Tensor:
    """`count` means [count, *shape] of `size` random examples of `part` (all of them if it has fewer)."""
    size = min(size, len(part))
    rows = torch.cat([torch.randperm(len(part))[:size] for _ in range(count)])
    return torch.stack([batch.x.mean(0) for batch in part.batches(size, rows)])


def labelled_means(part: Any, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels as probabilities): means of `part` in random groups of `size`, what is left over unused."""
    rows = torch.randperm(len(part))
    rows = rows[: len(rows) // size * size]
    means = [(batch.x.mean(0), soft(batch.y, classes).mean(0)) for batch in part.batches(size, rows)]
    x, y = (torch.stack(values) for values in zip(*means, strict=True))
    return x, y


def mixture(proxy: Tensor, batch: Batch, examples: int, classes: int) -> Batch:
    """Each of `proxy` [n, ...] averaged with `examples` of the batch, its label 1/C likewise with theirs (Eq. 4).

    A batch is in random order, so the examples with row j are those of the rows after j in it, round about.
    """
    rows = torch.arange(len(proxy), device=proxy.device)[:, None] + torch.arange(1, examples + 1, device=proxy.device)
    rows = rows % len(batch.x)
    x = (proxy + batch.x[rows].sum(1)) / (examples + 1)
    return Batch(x, (1 / classes + soft(batch.y, classes)[rows].sum(1)) / (examples + 1))
