"""Scores of a model on examples: accuracy and mean loss."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.engine.device_data import Part
from rayfed.metrics.base import OfPredictions

# Values of inputs in a batch. On a CPU, what a layer makes of a batch should stay in its cache: the four-layer CNN on
# 28 x 28 images takes 80 µs an example in batches of 83 and 90 in batches of 200. A GPU wants to be kept busy.
_VALUES = {"cpu": 2**16, "cuda": 2**22}
_ROWS = {"cpu": (16, 512), "cuda": (64, 4096)}


class Score(NamedTuple):
    """One value: of a client, by the partition's number (-1: the server), on a split of its data, of the model at a
    point. A `unseen` is a client that took no part in training."""

    client: int
    domain: str
    split: str
    point: str
    metric: str
    value: float
    n: int
    unseen: bool = False


Values = list[tuple[str, float, int]]
"""(metric, value, examples), …"""


@torch.no_grad()
def score(
    algorithm: Algorithm, ctx: Context, model: Any, parts: Sequence[Part], metrics: Sequence[OfPredictions] = ()
) -> list[Values]:
    """Of each part, none of which is empty: `loss`, the mean per example, `accuracy` in [0, 1] where y are classes, and
    `metrics`.

    The parts share batches, which is several times as fast where they are small.
    """
    found, more = [], []
    for part, logits in zip(parts, predictions(algorithm, ctx, model, parts), strict=True):
        loss = ctx.task.loss(logits, part.y).double()
        right = (logits.argmax(1) == part.y).double().mean() if _classes(part) else torch.zeros_like(loss)
        found.append(torch.stack([right, loss]))
        more.append([(v.metric, v.value, v.n) for metric in metrics for v in metric.measure(logits, part.y)])
    values = torch.stack(found).tolist() if found else []  # one transfer for all
    return [
        [*([("accuracy", right, len(part))] if _classes(part) else []), ("loss", loss, len(part)), *others]
        for part, (right, loss), others in zip(parts, values, more, strict=True)
    ]


@torch.no_grad()
def predictions(algorithm: Algorithm, ctx: Context, model: Any, parts: Sequence[Part]) -> Iterator[Tensor]:
    """The logits [n, classes] of each part, in their order."""
    pieces: list[Tensor] = []
    batches = _batches(parts)
    for part in parts:
        while sum(map(len, pieces)) < len(part):
            pieces.append(algorithm.predict(ctx, model, next(batches)))
        held = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        yield held[: len(part)]
        pieces = [held[len(part) :]]


def _batches(parts: Sequence[Part]) -> Iterator[Tensor]:
    """All inputs one after the other, normalised, in batches that do not stop where a part does."""
    if not parts:
        return
    size = batch_size(parts[0])
    waiting: list[Tensor] = []
    room = size
    for part in parts:
        start = 0
        while start < len(part):
            some = part.x[start : start + room]
            waiting.append(some)
            start, room = start + len(some), room - len(some)
            if not room:
                yield part.normalise(torch.cat(waiting) if len(waiting) > 1 else some)
                waiting, room = [], size
    if waiting:
        yield parts[-1].normalise(torch.cat(waiting))


def batch_size(part: Part) -> int:
    """How many examples to score at once: as many as make good use of the device, by the size of an input."""
    device = part.y.device.type
    least, most = _ROWS.get(device, _ROWS["cpu"])
    return max(least, min(most, _VALUES.get(device, _VALUES["cpu"]) // max(1, part.x[:1].numel())))


def _classes(part: Part) -> bool:
    return part.y.dim() == 1 and not part.y.is_floating_point()
