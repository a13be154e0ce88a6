"""A model with an explicit split point: `features` up to a representation, `head` from there to the logits."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError


class SplitModel(nn.Module):
    """`forward = head ∘ features`.

    `features` maps inputs (B, *shape) to representations (B, *feature_shape), taken after their activation and
    pooling; `head` maps those to logits (B, C). The split decides what FedRep, FedPer and FedBABU call the body, where
    DBE adds its bias, and which representations ADCOL, MOON, FedProto and FRAug look at.
    """

    def __init__(self, features: nn.Module, head: nn.Module, shape: tuple[int, ...] | None = None) -> None:
        """With `shape`, that of one input, `feature_shape` is found by a dry run on zeros."""
        super().__init__()
        self.features = features
        self.head = head
        self.feature_shape: tuple[int, ...] = ()
        if shape is not None:
            self.feature_shape = tuple(dry_run(features, torch.zeros(1, *shape)).shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def dry_run(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)` in evaluation mode, without gradients and without touching any buffer; modes are put back.

    Raises:
        UsageError: an input of this shape does not fit.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            out = module(x)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model: an input of shape {_text(x.shape[1:])} does not fit ({reason})") from error
    finally:
        for part, mode in modes:
            part.training = mode
    if not isinstance(out, Tensor):
        raise UsageError(f"model: the output must be one tensor of logits, got {type(out).__name__}")
    return out


def example_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Two inputs for checks, the same on every call: noise, or zeros where `dtype` is one of token numbers."""
    if not dtype.is_floating_point:
        return torch.zeros(2, *shape, dtype=dtype)
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def ensure_split(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> SplitModel:
    """`module` as a model with a split point; `shape` is that of one input.

    A module that has `features(x)` and an `nn.Module` called `head` keeps its own split, which is checked; any other
    is split before its last linear layer.

    Raises:
        UsageError: the module contradicts itself or cannot be split.
    """
    declared = getattr(module, "feature_shape", None)
    if callable(getattr(module, "features", None)) and hasattr(module, "head"):
        if not isinstance(module.head, nn.Module):
            raise UsageError(
                f"model {type(module).__name__}: head must be an nn.Module, got {type(module.head).__name__}"
            )
        x = example_inputs(shape, dtype)
        z = dry_run(_Part(module, "features"), x)
        try:
            agrees = torch.allclose(dry_run(_Part(module, "head"), z), dry_run(module, x), atol=1e-5)
        except UsageError:
            agrees = False
        if agrees:
            found = tuple(z.shape[1:])
            if declared and tuple(declared) != found:
                raise UsageError(
                    f"model {type(module).__name__}: feature_shape is {_text(declared)}, features give {_text(found)}"
                )
            module.feature_shape = found  # type: ignore[assignment]
            return module  # type: ignore[return-value]  # a Split in all but its class
        if declared:
            raise UsageError(f"model {type(module).__name__}: forward(x) must equal head(features(x)); it does not")
    return split_last_linear(module, shape, dtype)


def split_last_linear(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> SplitModel:
    """`module` cut before the `nn.Linear` that is run last: that layer is the head, everything else the features.

    Raises:
        UsageError: there is no linear layer, or the module does not end in it (a softmax after it, a layer used twice).
    """
    where = f"model {type(module).__name__}"
    advice = "give it features(x) and a module called head"
    calls: list[tuple[nn.Module, Tensor]] = []
    linear: dict[nn.Module, str] = {part: name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    hooks = [part.register_forward_hook(lambda part, args, out: calls.append((part, args[0]))) for part in linear]
    x = example_inputs(shape, dtype)
    try:
        logits = dry_run(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise UsageError(f"{where}: no nn.Linear to split at; {advice}")
    head, z = calls[-1]
    features: nn.Module = nn.Identity()
    if linear[head]:
        features = module
        module.set_submodule(linear[head], nn.Identity())
    parts = SplitModel(features, head)
    for ours, theirs in ((dry_run(features, x), z), (dry_run(parts, x), logits)):
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-5, equal_nan=True):
            raise UsageError(f"{where}: does not end in its last nn.Linear; {advice}")
    parts.feature_shape = tuple(z.shape[1:])
    return parts


def split_after(layers: "OrderedDict[str, nn.Module]", last: str, shape: tuple[int, ...]) -> SplitModel:
    """A chain of named layers split after the one called `last`; a head of one layer is that layer itself."""
    names = list(layers)
    end = names.index(last) + 1
    features = nn.Sequential(OrderedDict((name, layers[name]) for name in names[:end]))
    rest = OrderedDict((name, layers[name]) for name in names[end:])
    head = next(iter(rest.values())) if len(rest) == 1 else nn.Sequential(rest)
    return SplitModel(features, head, shape)


class _Part(nn.Module):
    """One half of a model as a module of its own, so that `functional_call` can reach it."""

    def __init__(self, model: nn.Module, part: str) -> None:
        super().__init__()
        self.model = model
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model, self.part)(x)


def _text(shape: Any) -> str:
    return "x".join(str(size) for size in shape) or "()"
