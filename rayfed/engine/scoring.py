"""Scores of a model on examples: accuracy and mean loss."""

from typing import Any, NamedTuple

import torch

from rayfed.algorithm import Algorithm, Context
from rayfed.engine.resident import Part

SCORE_BATCH = 500


class Score(NamedTuple):
    """One value: of a client (-1: the server), on a split of its data, of the model at a point."""

    client: int
    domain: str
    split: str
    point: str
    metric: str
    value: float
    n: int


@torch.no_grad()
def score(algorithm: Algorithm, ctx: Context, model: Any, part: Part) -> list[tuple[str, float, int]]:
    """(metric, value, examples): `loss`, the mean per example, and `accuracy` in [0, 1] where y are classes."""
    classes = part.y.dim() == 1 and not part.y.is_floating_point()
    correct = torch.zeros((), device=part.y.device, dtype=torch.float64)
    total = torch.zeros((), device=part.y.device, dtype=torch.float64)
    for batch in part.batches(SCORE_BATCH):
        logits = algorithm.predict(ctx, model, batch.x)
        total += ctx.task.loss(logits, batch.y).double() * len(batch.y)
        if classes:
            correct += (logits.argmax(1) == batch.y).sum()
    n = len(part)
    rows = [("loss", float(total) / n, n)]
    return [("accuracy", float(correct) / n, n), *rows] if classes else rows
