"""Prototypes: the mean feature of each class, with a client (FRAug) or over all of them (FedProto)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def one_hot(y: Tensor, classes: int) -> Tensor:
    """[batch, classes]; nothing but zeros where there are 0 classes, networks that are not told the class."""
    return (y[:, None] == torch.arange(classes, device=y.device)).float()


def moved(prototypes: Tensor, seen: Tensor, features: Tensor, y: Tensor, rate: float) -> Tensor:
    """Prototypes [classes, width] after a batch: ū_c ← (1 − rate)·ū_c + rate·mean of the class in the batch.

    A class that is met for the first time starts at its mean, and a class that is not in the batch stays.
    """
    members = one_hot(y, len(prototypes))
    counts = members.sum(0)[:, None]
    means = members.T @ features / counts.clamp(min=1)
    blend = torch.where(seen[:, None], (1 - rate) * prototypes + rate * means, means)
    return torch.where(counts > 0, blend, prototypes)


def pooled(old: dict[str, Tensor], means: Sequence[Tensor], shares: Sequence[Tensor]) -> dict[str, Tensor]:
    """Prototypes `means` [classes, width] of the clients' means by their shares [classes], and which are `known`.

    A class of which nobody has a share stays as it was in `old`.
    """
    weights = torch.stack(list(shares))
    total = weights.sum(0)
    found = (weights[:, :, None] * torch.stack(list(means))).sum(0) / total.clamp(min=1)[:, None]
    return {
        "means": torch.where(total[:, None] > 0, found, old["means"]),
        "known": torch.maximum(old["known"], (total > 0).float()),
    }


def nearness(features: Tensor, means: Tensor, known: Tensor) -> Tensor:
    """Logits [batch, classes]: minus the mean squared distance; classes that are not `known` come last."""
    distances = (features[:, None] - means).square().mean(2)
    farthest = torch.where(known, distances, 0).amax(1, keepdim=True)
    return -torch.where(known, distances, farthest + 1)
