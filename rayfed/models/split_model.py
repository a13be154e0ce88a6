"""Models with a split point: `features` computes a representation, `head` computes the logits from it."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout, layout_of
from rayfed.core.network import logits_of
from rayfed.core.options import suggestion
from rayfed.models.remedies import remedy_for_inputs


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
        self.feature_dtype = torch.get_default_dtype()
        if shape is not None:
            self.feature_shape = tuple(dry_run(features, torch.zeros(1, *shape)).shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def dry_run(module: nn.Module, x: Tensor, part: Callable[[Tensor], Any] | None = None) -> Tensor:
    """Return `module(x)` in evaluation mode, without gradients. Buffers and the training mode are left unchanged.

    `part`, a method or a submodule of `module`, is called in its place.

    Raises:
        UsageError: The module cannot take an input of this shape.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            out = logits_of((part or module)(x))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        shape = layout_of(module) or "x".join(map(str, x.shape[1:])) or "()"
        remedy = "" if layout_of(module) else remedy_for_inputs(module, x)
        reason = "; ".join(filter(None, [f"does not fit ({reason})", remedy]))
        raise UsageError(f"model: an input of shape {shape} {reason}") from error
    finally:
        for layer, mode in modes:
            layer.training = mode
    if not isinstance(out, Tensor):
        raise UsageError(
            f"model: must return a tensor of logits, an object or a mapping with logits, or a tuple that begins with "
            f"them; got {type(out).__name__}"
        )
    return out


def example_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout | None = None) -> Tensor:
    """Return two fixed inputs for checks: noise, or zeros if `dtype` is an integer type (token numbers)."""
    if layout is not None:
        return layout.example(2)
    if not dtype.is_floating_point:
        return torch.zeros(2, *shape, dtype=dtype)
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def initialise_lazy_layers(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout | None = None
) -> None:
    """Give lazy layers, such as `nn.LazyLinear`, their weights for inputs of `shape`, drawn from the global generator.

    Raises:
        UsageError: The module cannot take an input of this shape.
    """
    if any(is_lazy(value) for value in (*module.parameters(), *module.buffers())):
        hook = layout and layout.attach(module)
        dry_run(module, example_inputs(shape, dtype, layout))
        if hook:
            hook.remove()


def check_whole(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Try a model that is not split, and note in it the number of its outputs if each example has a vector of them.

    Raises:
        UsageError: It cannot take such inputs, or its outputs depend on more than them.
    """
    outputs = dry_run(module, example_inputs(shape, dtype, layout_of(module)))
    if obstacle := _obstacle(module, shape, dtype):
        raise UsageError(f"model {type(module).__name__}: {obstacle}")
    module.output_width = outputs.shape[1] if outputs.ndim == 2 else 0  # type: ignore[assignment]


def ensure_split(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, head: str | None = None
) -> SplitModel:
    """Return `module` as a model with a split point.

    A module with a method `features(x)` and an `nn.Module` called `head` keeps its own split if
    `head(features(x)) = forward(x)`; any other module is split before its submodule called `head`, by default its last
    linear or convolutional layer, and may be modified. `shape` and `dtype` are those of one input.

    Raises:
        UsageError: The module declares a split that is wrong, or it cannot be split.
    """
    declared = getattr(module, "feature_shape", None)
    has_head = callable(getattr(module, "features", None)) and isinstance(getattr(module, "head", None), nn.Module)
    if has_head and layout_of(module) is not None:  # which calls the whole module alone
        head = head or "head"
    elif head is None and has_head:
        x = example_inputs(shape, dtype)
        z = dry_run(module, x, module.features)  # type: ignore[arg-type]
        try:
            agrees = torch.allclose(dry_run(module, z, module.head), dry_run(module, x), atol=1e-5)  # type: ignore[arg-type]
        except UsageError:
            agrees = False
        if agrees:
            module.feature_shape, module.feature_dtype = tuple(z.shape[1:]), z.dtype  # type: ignore[assignment]
            return module  # type: ignore[return-value]  # it has the interface of a SplitModel
        if declared:
            raise UsageError(f"model {type(module).__name__}: forward(x) must equal head(features(x)); it does not")
    return split_last_linear(module, shape, dtype, head=head)


def split_last_linear(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, head: str | None = None
) -> SplitModel:
    """Split `module` before a layer that ends it: this layer becomes the head, all others the features.

    The layer is the submodule called `head`, by default the linear or convolutional layer that runs last. Its outputs
    may yet be reshaped, or the axis of the classes moved. The module is modified.

    Raises:
        UsageError: The module has no such layer or does not end in it (a softmax follows, or it is used twice).
    """
    where = f"model {type(module).__name__}"
    advice = "name the submodule that ends it by model.head, or give it a method features(x) and a module called head"
    named = dict(module.named_modules())
    if head is not None and not named.get(head):
        raise UsageError(f"model.head: {where} has no submodule {head!r}; {suggestion(head, [*named])}")
    calls: list[tuple[nn.Module, Tensor]] = []
    ends: dict[nn.Module, str] = {
        layer: name
        for name, layer in named.items()
        if (isinstance(layer, (nn.Linear, _ConvNd)) if head is None else name == head)
    }
    hooks = [layer.register_forward_hook(lambda layer, args, out: calls.append((layer, args[0]))) for layer in ends]
    kinds: list[bool] = []
    hooks.append(module.register_forward_hook(lambda layer, args, out: kinds.append(isinstance(out, Tensor))))
    x = example_inputs(shape, dtype, layout_of(module))
    try:
        logits = dry_run(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise UsageError(f"{where}: no {'nn.Linear' if head is None else head} to split at; {advice}")
    last, z = calls[-1]
    features: nn.Module = nn.Identity()
    if ends[last]:
        features = module if kinds[-1] else _Moved(module, 0, 0)
        module.set_submodule(ends[last], nn.Identity())
    end = f"its last nn.{type(last).__name__}" if head is None else f"model.head={head}"
    fault = f"does not end in {end}; {advice}"
    try:
        model = _composition(features, last, x, z, logits)
    except UsageError as error:
        raise UsageError(f"{where}: {fault}") from error
    if model is None:
        raise UsageError(f"{where}: {_obstacle(features, shape, dtype) or fault}")
    model.feature_shape, model.feature_dtype = tuple(z.shape[1:]), z.dtype
    return model


def _composition(features: nn.Module, last: nn.Module, x: Tensor, z: Tensor, logits: Tensor) -> SplitModel | None:
    """Return the model of `features` and the layer `last`, whose input is `z`, or None if they do not give `logits`.

    `features` ends in what follows the layer, which is undone there and done after the layer.
    """
    seen, own = dry_run(features, x), dry_run(last, z)
    moves = ((0, 0), (1, -1), (-1, 1)) if min(z.ndim, logits.ndim) > 2 else ((0, 0),)
    for source, target in moves:
        pairs = (seen.movedim(target, source), z), (own.movedim(source, target), logits)
        if all(a.numel() == b.numel() and _close(a.reshape(b.shape), b) for a, b in pairs):
            if seen.shape == z.shape and own.shape == logits.shape:
                return SplitModel(features, last)
            return SplitModel(_Moved(features, target, source, z.shape), _Moved(last, source, target, logits.shape))
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5, equal_nan=True)


def _obstacle(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why outputs of `module` cannot be compared, or None if they can."""
    layout = layout_of(module)
    x = example_inputs(shape, dtype, layout)
    first = dry_run(module, x)
    if not torch.equal(x, example_inputs(shape, dtype, layout)):
        return "modifies its input; write x = x + 1 in place of x += 1"
    if not _close(first, dry_run(module, x)):
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


class _Moved(nn.Module):
    """A module that returns logits alone, with another order of axes, or `shape`, of which the first axis is free."""

    def __init__(self, module: nn.Module, source: int, target: int, shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.module, self.axes, self.shape = module, (source, target), shape and tuple(shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = logits_of(self.module(x)).movedim(*self.axes)
        return outputs if self.shape is None else outputs.reshape(len(x), *self.shape)
