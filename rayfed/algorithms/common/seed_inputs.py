"""What FAug's clients send and add: a few examples of each class as seeds, and classes for generated examples."""

from typing import Any

import torch
from torch import Tensor


def drawn_seeds(part: Any, count: int) -> dict[str, Tensor]:
    """Inputs `x` [n, ...] and classes `y` [n] of up to `count` random examples of every class; torch's generator."""
    found = [torch.nonzero(part.y == c)[:, 0] for c in part.y.unique()]
    rows = torch.cat([own[torch.randperm(len(own))[:count].to(own.device)] for own in found])
    return {"x": torch.cat([batch.x for batch in part.batches(512, rows)]), "y": part.y[rows]}


def levelled(counts: Tensor, total: int, among: Tensor) -> Tensor:
    """`total` classes, one after the other the one of `among` with the fewest examples (the lowest of several).

    `counts` [classes] are the examples that there are, `among` [classes] says which classes there may be more of.
    """
    left, classes = dict(zip(among.nonzero()[:, 0].tolist(), counts[among].tolist(), strict=True)), []
    for _ in range(total):
        classes.append(min(left, key=left.__getitem__))
        left[classes[-1]] += 1
    return torch.tensor(classes, device=counts.device)
