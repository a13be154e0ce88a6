"""Scores of a model on examples: accuracy, mean loss, and the metrics of predictions."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.core.errors import BadHook
from rayfed.core.outputs import class_logits
from rayfed.core.records import Score, Selection
from rayfed.engine.device_data import Part
from rayfed.metrics.base import OfPredictions, Value
from rayfed.records.metric_names import lower_is_better_by_name

# Numbers in the inputs of one batch. On a CPU the outputs of a layer should fit its cache: the four-layer CNN on images
# of 28 x 28 takes 80 µs per example in batches of 83, and 90 in batches of 200. A GPU needs larger batches.
_VALUES = {"cpu": 2**16, "cuda": 2**22}
_ROWS = {"cpu": (16, 512), "cuda": (64, 4096)}


@torch.no_grad()
def score(
    algorithm: Algorithm,
    ctx: Context,
    model: Any,
    point: str,
    parts: Sequence[Part],
    metrics: Sequence[OfPredictions] = (),
    selection: Selection | None = None,
) -> list[Score]:
    """Return the scores of the model at `point` on each of `parts`, in their order; no part may be empty.

    The scores are `accuracy` in [0, 1] where the outputs stand for classes (`rayfed.core.outputs`), `loss`, the mean
    per example, and those of `metrics`. The parts share batches, which is several times as fast where they are small;
    where an example's output depends on its batch, each part has its own.
    """
    results, others = [], []
    for part, logits in zip(parts, predictions(algorithm, ctx, model, parts), strict=True):
        loss = ctx.task.scoring_loss(logits, part.y, model).double()
        classified = class_logits(ctx.task.outputs, logits, part.y)
        accuracy = torch.zeros_like(loss)
        if classified is not None:
            accuracy = (classified[0].argmax(1) == classified[1]).double().mean()
        results.append(torch.stack([accuracy, loss]))
        others.append(_measured(metrics, logits, part, classified))
    scores = []
    rows = torch.stack(results).tolist() if results else []  # one transfer from the device for all
    for part, (accuracy, loss), more in zip(parts, rows, others, strict=True):
        accuracies = [Value("accuracy", accuracy, len(part), higher_is_better=True)]
        losses = [Value("loss", loss, len(part), higher_is_better=False)]
        values = [*(accuracies if ctx.task.outputs != "unknown" else ()), *losses, *more]
        scores += [as_score(value, selection, point=point, **part.place) for value in values]
    return scores


def as_score(value: Value, selection: Selection | None = None, **place: Any) -> Score:
    """Return `value` as a score at `place`: `point`, `split`, and the other columns that say of what it is.

    `selection` says whether higher is better of the metric that chooses, which may not declare it.
    """
    higher_is_better = value.higher_is_better
    if higher_is_better is None:
        higher_is_better = not lower_is_better_by_name(value.metric)
        if selection is not None and selection.metric == value.metric:
            higher_is_better = selection.higher_is_better
    return Score(metric=value.metric, value=value.value, n=value.n, higher_is_better=higher_is_better, **place)


def _measured(
    metrics: Sequence[OfPredictions], logits: Tensor, part: Part, classified: tuple[Tensor, Tensor] | None
) -> list[Value]:
    """Return the values of `metrics`; `classified` are the logits and labels as classes, if they stand for any."""
    values = []
    for metric in metrics:
        arguments = classified if metric.requires_classes and classified is not None else (logits, part.y)
        values += [metric.declared(value) for value in metric.each(metric.measure(*arguments))]
    names = [value.metric for value in values]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadHook(f"metrics: two values of a model on the same data are called {twice[0]}; rename one of them")
    return values


@torch.no_grad()
def predictions(algorithm: Algorithm, ctx: Context, model: Any, parts: Sequence[Part]) -> Iterator[Tensor]:
    """Yield the outputs [n, ...] of each part, in their order."""
    if ctx.task.rows_interact:
        for part in parts:  # in batches of nearly one size, so that none has one example
            count = -(-len(part) // batch_size(part))
            chunks = (range(k * len(part) // count, (k + 1) * len(part) // count) for k in range(count))
            inputs = (part.normalise(part.x[chunk.start : chunk.stop]) for chunk in chunks)
            yield torch.cat([algorithm.predict(ctx, model, x) for x in inputs])
        return
    pieces: list[Tensor] = []  # logits that are not yet yielded
    batches = _batches(parts)
    for part in parts:
        while sum(map(len, pieces)) < len(part):
            pieces.append(algorithm.predict(ctx, model, next(batches)))
        logits = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        yield logits[: len(part)]
        pieces = [logits[len(part) :]]


def _batches(parts: Sequence[Part]) -> Iterator[Tensor]:
    """Yield the normalised inputs of all parts in turn, in batches that may span several parts."""
    if not parts:
        return
    size = batch_size(parts[0])
    waiting: list[Tensor] = []
    room = size
    for part in parts:
        start = 0
        while start < len(part):
            rows = part.x[start : start + room]
            waiting.append(rows)
            start, room = start + len(rows), room - len(rows)
            if not room:
                yield part.normalise(torch.cat(waiting) if len(waiting) > 1 else rows)
                waiting, room = [], size
    if waiting:
        yield parts[-1].normalise(torch.cat(waiting))


def batch_size(part: Part) -> int:
    """Return how many examples of `part` to score at once, by the size of an input and the kind of device."""
    device = part.y.device.type
    least, most = _ROWS.get(device, _ROWS["cpu"])
    return max(least, min(most, _VALUES.get(device, _VALUES["cpu"]) // max(1, part.x[:1].numel())))
