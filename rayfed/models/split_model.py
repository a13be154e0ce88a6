"""Models with a split point: `features` computes a representation, `head` computes the logits from it."""

import contextlib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rayfed.core.errors import UsageError


class SplitModel(nn.Module):
    """A model whose forward pass is `head(features(x))`.

    The split determines the body of FedRep, FedPer and FedBABU, the position of DBE's bias, and the representations
    that ADCOL, MOON, FedProto and FRAug use.

    Args:
        features: Maps inputs (B, *shape) to representations (B, *feature_shape), after activation and pooling.
        head: Maps representations to logits (B, C).
        shape: Shape of one input. If given, `feature_shape` is determined by a forward pass on zeros.
    """

    def __init__(self, features: nn.Module, head: nn.Module, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.feature_shape: tuple[int, ...] = ()
        if shape is not None:
            self.feature_shape = tuple(dry_run(features, torch.zeros(1, *shape)).shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def dry_run(module: nn.Module, x: Tensor) -> Tensor:
    """Return `module(x)` in evaluation mode, without gradients. Buffers and the training mode are left unchanged.

    Raises:
        UsageError: The module cannot take an input of this shape.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            out = module(x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason, shape = (str(error).splitlines() or [type(error).__name__])[0], "x".join(map(str, x.shape[1:])) or "()"
        if x.dtype != torch.float32 and _takes(module, x.float()):
            raise UsageError(
                f"model: takes inputs of float32, and these are {str(x.dtype).removeprefix('torch.')}; give "
                "x.astype('float32')"
            ) from error
        raise UsageError(f"model: an input of shape {shape} does not fit ({reason})") from error
    finally:
        for layer, mode in modes:
            layer.training = mode
    if not isinstance(out, Tensor):
        raise UsageError(f"model: the output must be one tensor of logits, got {type(out).__name__}")
    return out


def _takes(module: nn.Module, x: Tensor) -> bool:
    with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError), torch.no_grad():
        module(x)
        return True
    return False


def example_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return two fixed inputs for checks: noise, or zeros if `dtype` is an integer type (token numbers)."""
    if not dtype.is_floating_point:
        return torch.zeros(2, *shape, dtype=dtype)
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def initialise_lazy_layers(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Give lazy layers, such as `nn.LazyLinear`, their weights for inputs of `shape`, drawn from the global generator.

    Raises:
        UsageError: The module cannot take an input of this shape.
    """
    if any(is_lazy(value) for value in (*module.parameters(), *module.buffers())):
        dry_run(module, example_inputs(shape, dtype))


def ensure_split(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> SplitModel:
    """Return `module` as a model with a split point.

    A module with a method `features(x)` and an `nn.Module` called `head` keeps its own split if
    `head(features(x)) = forward(x)`; any other module is split before its last linear layer, and may be modified.
    `shape` and `dtype` are those of one input.

    Raises:
        UsageError: The module declares a split that is wrong, or it cannot be split.
    """
    declared = getattr(module, "feature_shape", None)
    if callable(getattr(module, "features", None)) and isinstance(getattr(module, "head", None), nn.Module):
        x = example_inputs(shape, dtype)
        z = dry_run(_SubModel(module, "features"), x)
        try:
            agrees = torch.allclose(dry_run(_SubModel(module, "head"), z), dry_run(module, x), atol=1e-5)
        except UsageError:
            agrees = False
        if agrees:
            module.feature_shape = tuple(z.shape[1:])  # type: ignore[assignment]
            return module  # type: ignore[return-value]  # it has the interface of a SplitModel
        if declared:
            raise UsageError(f"model {type(module).__name__}: forward(x) must equal head(features(x)); it does not")
    return split_last_linear(module, shape, dtype)


def split_last_linear(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> SplitModel:
    """Split `module` before the `nn.Linear` that runs last: this layer becomes the head, all others the features.

    The module is modified.

    Raises:
        UsageError: The module has no linear layer or does not end in it (a softmax follows, or it is used twice).
    """
    where = f"model {type(module).__name__}"
    advice = "give it a method features(x) and a module called head"
    calls: list[tuple[nn.Module, Tensor]] = []
    linear: dict[nn.Module, str] = {
        layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    }
    hooks = [layer.register_forward_hook(lambda layer, args, out: calls.append((layer, args[0]))) for layer in linear]
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
    model = SplitModel(features, head)
    for actual, expected in ((dry_run(features, x), z), (dry_run(model, x), logits)):
        if actual.shape != expected.shape or not torch.allclose(actual, expected, atol=1e-5, equal_nan=True):
            raise UsageError(
                f"{where}: {_obstacle(model, shape, dtype) or f'does not end in its last nn.Linear; {advice}'}"
            )
    model.feature_shape = tuple(z.shape[1:])
    return model


def _obstacle(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why outputs of `module` cannot be compared, or None if they can."""
    x = example_inputs(shape, dtype)
    first = dry_run(module, x)
    if not torch.equal(x, example_inputs(shape, dtype)):
        return "modifies its input; write x = x + 1 in place of x += 1"
    if not torch.allclose(first, dry_run(module, x), atol=1e-5, equal_nan=True):
        return (
            "gives different outputs for the same input in evaluation mode; draw random numbers, and change attributes "
            "that outputs depend on, only if self.training"
        )
    return None


def split_after(layers: "OrderedDict[str, nn.Module]", last: str, shape: tuple[int, ...]) -> SplitModel:
    """Build a model from a chain of named layers, split after the layer `last`.

    A head that consists of one layer is that layer itself, not an `nn.Sequential`.
    """
    names = list(layers)
    end = names.index(last) + 1
    features = nn.Sequential(OrderedDict((name, layers[name]) for name in names[:end]))
    rest = OrderedDict((name, layers[name]) for name in names[end:])
    head = next(iter(rest.values())) if len(rest) == 1 else nn.Sequential(rest)
    return SplitModel(features, head, shape)


class _SubModel(nn.Module):
    """The method or submodule `name` of a model as a module, for `dry_run`."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return getattr(self.model, self.name)(x)
