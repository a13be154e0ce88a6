"""FedFomo's ratings of the models that a client received, and their mixture by these ratings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfed.algorithm import Context, mean_loss
from rayfed.core.trees import Weights


def rated(ctx: Context, own: Weights, old: Weights, models: Sequence[Weights]) -> Tensor:
    """w_n of `models` [models]: what each gains over `old` on the validation part, by its distance from `old`.

    Below 0 for a model that is worse: the server adds these up, and so comes to try others.
    """
    ratings = torch.zeros(len(models), device=ctx.task.device)
    if not models:
        return ratings
    before = mean_loss(ctx, old, ctx.data.val)
    for n, model in enumerate(models):
        gain = before - mean_loss(ctx, own | model, ctx.data.val)
        squares = [(model[name] - old[name]).square().sum() for name in ctx.task.trainable if name in model]
        ratings[n] = gain / (torch.stack(squares).sum().sqrt() + 1e-5)
    return ratings


def mixed(own: Weights, models: Sequence[Weights], ratings: Tensor) -> Weights:
    """`own` with what `models` have in place of it, their mean by max(0, `ratings`); all of `own` where none is > 0."""
    shares = ratings.clamp(min=0)
    if not shares.any():
        return own
    shares = shares / shares.sum()
    return own | {
        name: torch.einsum("n,n...->...", shares, torch.stack([model[name] for model in models]))
        for name, value in models[0].items()
        if value.is_floating_point()  # counters stay the client's own
    }
