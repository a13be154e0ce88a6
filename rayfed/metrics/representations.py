"""Representations of a network at any layer, captured while an algorithm predicts."""

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
    """Raise `UsageError` if `model` has no such layer; `where` is the option's name in the message."""
    names = [name for name, _ in model.named_modules() if name]
    if layer not in (LOGITS, "features", "head") and layer not in names:
        raise UsageError(f"{where}: the model has no layer {layer!r}; {suggestion(layer, [LOGITS, *names])}")


@torch.no_grad()
def collect_representations(
    algorithm: Algorithm, ctx: Context, model: Any, part: Any, rows: Tensor, layers: Sequence[str]
) -> dict[str, Tensor]:
    """Return `model`'s representations of `rows` of `part` by layer: float32 [n, d] on the CPU, in evaluation mode."""
    outputs: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    for batch in part.batches(500, rows):
        with _captured_outputs(ctx.task.model.module, layers) as captured:
            captured[LOGITS] = algorithm.predict(ctx, model, batch.x)
        for layer in layers:
            outputs[layer].append(captured[layer].flatten(1).float().cpu())
    return {layer: torch.cat(parts) for layer, parts in outputs.items()}


@contextmanager
def _captured_outputs(module: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of the `layers` of `module` in a dict while the block runs; the last call counts."""
    captured: dict[str, Tensor] = {}
    undo: list[Callable[[], object]] = []
    for layer in layers:
        if layer == LOGITS:
            continue
        modules = dict(module.named_modules())  # before methods: DBE's model has both, and its bias lies between them
        part = modules[layer] if layer in modules else getattr(module, layer)
        if not isinstance(part, nn.Module):  # a method: shadowed on the object by one that captures
            module.__dict__[layer] = partial(_capture, part, layer, captured)
            undo.append(partial(module.__dict__.pop, layer))
        elif layer == "head":
            undo.append(part.register_forward_pre_hook(lambda _, args: captured.update(head=args[0])).remove)
        else:
            undo.append(part.register_forward_hook(lambda _, args, out, key=layer: captured.update({key: out})).remove)
    try:
        yield captured
    finally:
        for step in undo:
            step()


def _capture(method: Callable[[Tensor], Tensor], layer: str, captured: dict[str, Tensor], x: Tensor) -> Tensor:
    out = method(x)
    captured[layer] = x if layer == "head" else out
    return out
