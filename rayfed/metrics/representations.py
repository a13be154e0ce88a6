"""Representations of a network at any layer, caught while an algorithm predicts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithm import Algorithm, Context
from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion

LOGITS = "logits"


def check_layer(model: nn.Module, layer: str, where: str) -> None:
    """Raises UsageError where `model` has no such layer."""
    names = [name for name, _ in model.named_modules() if name]
    if layer not in (LOGITS, "features", "head") and layer not in names:
        raise UsageError(f"{where}: the model has no layer {layer!r}; {suggestion(layer, [LOGITS, *names])}")


@torch.no_grad()
def represented(
    algorithm: Algorithm, ctx: Context, model: Any, part: Any, rows: Tensor, layers: Sequence[str]
) -> dict[str, Tensor]:
    """By layer, what `model` makes of `rows` of `part`: float32 [n, d] on the CPU, in evaluation mode."""
    found: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    for batch in part.batches(500, rows):
        with _caught(ctx.task.model.module, layers) as caught:
            caught[LOGITS] = algorithm.predict(ctx, model, batch.x)
        for layer in layers:
            found[layer].append(caught[layer].flatten(1).float().cpu())
    return {layer: torch.cat(parts) for layer, parts in found.items()}


@contextmanager
def _caught(module: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within this block calls of `module` leave the outputs of its `layers` in the dict; the last call counts."""
    caught: dict[str, Tensor] = {}
    undo: list[Callable[[], object]] = []
    for layer in layers:
        if layer == LOGITS:
            continue
        whole = dict(module.named_modules())  # before methods: DBE's model has both, and its bias lies between them
        found = whole[layer] if layer in whole else getattr(module, layer)
        if not isinstance(found, nn.Module):  # a method: listened to by a stand-in on the object
            module.__dict__[layer] = _listening(found, layer, caught)
            undo.append(partial(module.__dict__.pop, layer))
        elif layer == "head":
            undo.append(found.register_forward_pre_hook(lambda _, args: caught.update(head=args[0])).remove)
        else:
            undo.append(found.register_forward_hook(lambda _, args, out, key=layer: caught.update({key: out})).remove)
    try:
        yield caught
    finally:
        for step in undo:
            step()


def _listening(method: Callable[[Tensor], Tensor], layer: str, caught: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        out = method(x)
        caught[layer] = x if layer == "head" else out
        return out

    return call
