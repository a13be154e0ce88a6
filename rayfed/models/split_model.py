"""Models with a split point: `features` computes a representation, `head` computes the logits from it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout, layout_of
from rayfed.core.modules import unchanged
from rayfed.core.network import logits_of
from rayfed.core.options import suggestion
from rayfed.models.remedies import remedy_for_inputs


class SplitModel(nn.Module):
    """A model with the forward pass `head(features(x))`.

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
            z = dry_run(features, torch.zeros(1, *shape))
            self.feature_shape = tuple(z.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def dry_run(module: nn.Module, x: Tensor, part: Callable[[Tensor], Any] | None = None) -> Tensor:
    """Return `module(x)` in evaluation mode, without gradients. It leaves no trace in the module.

    `part`, a method or a submodule of `module`, is called in its place.

    Raises:
        UsageError: The module cannot take an input of this shape.
    """
    call = part or module
    modes = [(layer, layer.training) for layer in module.modules()]
    with unchanged(module):
        module.eval()
        try:
            with torch.no_grad():
                returned = call(x)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            lines = str(error).splitlines()
            if lines:
                reason = lines[0]
            else:
                reason = type(error).__name__
            shape = layout_of(module) or "x".join(map(str, x.shape[1:])) or "()"
            remedy = ""
            if not layout_of(module):
                remedy = remedy_for_inputs(module, x)
            reason = "; ".join(filter(None, [f"does not fit ({reason})", remedy]))
            raise UsageError(f"model: an input of shape {shape} {reason}") from error
        finally:
            for layer, mode in modes:
                layer.training = mode
    logits = logits_of(returned)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"model: must return a tensor of logits, an object or a mapping with logits, or a tuple that begins with "
            f"them; got {type(logits).__name__}"
        )
    if not logits.ndim:
        raise UsageError(
            "model: what it returns begins with a scalar, such as a loss; return the logits, or a tuple that begins "
            "with them"
        )
    return logits


def example_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout | None = None, *, integer: int = 0
) -> Tensor:
    """Return two fixed inputs for checks: noise, or `integer` everywhere if `dtype` is an integer type (tokens)."""
    if layout is not None:
        return layout.example(2, integer)
    if not dtype.is_floating_point:
        return torch.full((2, *shape), integer, dtype=dtype)
    rng = torch.Generator().manual_seed(0)
    return torch.randn(2, *shape, generator=rng, dtype=dtype)


def fitting_inputs(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `example_inputs` of ones or of zeros: those of which the outputs of `module` are numbers, else zeros.

    Zero is often the padding, and a text or a mask of nothing else has no mean and no length.
    """
    layout = layout_of(module)
    if layout is None and dtype.is_floating_point:
        return example_inputs(shape, dtype)
    weight = next(module.parameters(), torch.empty(0))
    ones = example_inputs(shape, dtype, layout, integer=1)
    try:
        outputs = dry_run(module, ones.clone().to(weight.device))
    except UsageError:  # an embedding of one word
        return example_inputs(shape, dtype, layout)
    if outputs.isfinite().all():
        return ones
    return example_inputs(shape, dtype, layout)


def initialise_lazy_layers(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout | None = None
) -> None:
    """Give lazy layers, such as `nn.LazyLinear`, their weights for inputs of `shape`, drawn from the global generator.

    Raises:
        UsageError: The module cannot take an input of this shape.
    """
    if not has_lazy_layers(module):
        return
    hook = None
    if layout is not None:
        hook = layout.attach(module)
    dry_run(module, fitting_inputs(module, shape, dtype))
    if hook is not None:
        hook.remove()


def has_lazy_layers(module: nn.Module) -> bool:
    """Return whether a layer of `module` gets its weights at its first forward pass."""
    return any(is_lazy(value) for value in (*module.parameters(), *module.buffers()))


def check_whole(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Try a model that is not split, and note in it the number of its outputs if each example has a vector of them.

    Raises:
        UsageError: It cannot take such inputs, or its outputs depend on more than them.
    """
    x = fitting_inputs(module, shape, dtype)
    outputs = dry_run(module, x.clone())
    obstacle = _obstacle(module, x)
    if obstacle:
        raise UsageError(f"model {type(module).__name__}: {obstacle}")
    width = 0
    if outputs.ndim == 2:
        width = outputs.shape[1]
    module.output_width = width  # type: ignore[assignment]


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
    has_features = callable(getattr(module, "features", None))
    has_head = isinstance(getattr(module, "head", None), nn.Module)
    if has_features and has_head:
        if layout_of(module) is not None:  # which calls the whole module alone
            head = head or "head"
        elif head is None and _keeps_split(module, shape, dtype):
            return module  # type: ignore[return-value]  # it has the interface of a SplitModel
    return split_last_linear(module, shape, dtype, head=head)


def _keeps_split(module: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether `head(features(x)) = forward(x)`; if so, note the form of the features in `module`.

    Raises:
        UsageError: It is not so, though the module declares `feature_shape`.
    """
    declared = getattr(module, "feature_shape", None)
    x = fitting_inputs(module, shape, dtype)
    z = dry_run(module, x, module.features)
    try:
        composed = dry_run(module, z, module.head)
        agrees = torch.allclose(composed, dry_run(module, x), atol=1e-5)
    except UsageError:
        agrees = False
    if agrees:
        module.feature_shape = tuple(z.shape[1:])
        module.feature_dtype = z.dtype
    elif declared:
        raise UsageError(f"model {type(module).__name__}: forward(x) must equal head(features(x)); it does not")
    return agrees


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
    names = _possible_heads(module, head)
    x = fitting_inputs(module, shape, dtype)
    run = _watched_run(module, x, names)
    if not run.calls:
        what = "nn.Linear"
        if head is not None:
            what = head
        raise UsageError(f"{where}: no {what} to split at; {advice}")
    last, z = run.calls[-1]
    features: nn.Module = nn.Identity()  # the module is a single layer
    if names[last]:
        if run.returns_tensor:
            features = module
        else:
            features = _Moved(module, 0, 0)
        module.set_submodule(names[last], nn.Identity())
    if head is None:
        end = f"its last nn.{type(last).__name__}"
    else:
        end = f"model.head={head}"
    fault = f"does not end in {end}; {advice}"
    try:
        model = _composition(features, last, x, z, run.logits)
    except UsageError as error:
        raise UsageError(f"{where}: {fault}") from error
    if model is None:
        raise UsageError(f"{where}: {_obstacle(features, fitting_inputs(features, shape, dtype)) or fault}")
    model.feature_shape = tuple(z.shape[1:])
    model.feature_dtype = z.dtype
    return model


def _possible_heads(module: nn.Module, head: str | None) -> dict[nn.Module, str]:
    """Return the names of the layers that may become the head: of the submodule `head`, or of all linear layers and
    convolutions.

    Raises:
        UsageError: There is no submodule called `head`.
    """
    named = dict(module.named_modules())
    if head is None:
        return {layer: name for name, layer in named.items() if isinstance(layer, (nn.Linear, _ConvNd))}
    if not named.get(head):
        raise UsageError(
            f"model.head: model {type(module).__name__} has no submodule {head!r}; {suggestion(head, [*named])}"
        )
    return {named[head]: head}


class _Run(NamedTuple):
    """A run of a module: its logits, the calls of the watched layers with their inputs, and what it returned."""

    logits: Tensor
    calls: list[tuple[nn.Module, Tensor]]
    returns_tensor: bool


def _watched_run(module: nn.Module, x: Tensor, layers: Iterable[nn.Module]) -> _Run:
    """Run `module` on `x` and watch `layers`."""
    calls: list[tuple[nn.Module, Tensor]] = []
    returned: list[Any] = []

    def note_call(layer: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        calls.append((layer, args[0]))

    def note_outputs(layer: nn.Module, args: Any, out: Any) -> None:
        returned.append(out)

    hooks = [layer.register_forward_hook(note_call) for layer in layers]
    hooks.append(module.register_forward_hook(note_outputs))
    try:
        logits = dry_run(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    return _Run(logits, calls, isinstance(returned[-1], Tensor))


def _composition(features: nn.Module, last: nn.Module, x: Tensor, z: Tensor, logits: Tensor) -> SplitModel | None:
    """Return the model of `features` and the layer `last`, or None if they do not give `logits`.

    The layer's input is `z`. `features` ends in what follows the layer, which is undone there and done after the layer.
    """
    seen = dry_run(features, x)
    own = dry_run(last, z)
    moves = [(0, 0)]
    if min(z.ndim, logits.ndim) > 2:
        moves += [(1, -1), (-1, 1)]
    for source, target in moves:
        undone = seen.movedim(target, source)
        done = own.movedim(source, target)
        if _equal_values(undone, z) and _equal_values(done, logits):
            if seen.shape == z.shape and own.shape == logits.shape:
                return SplitModel(features, last)
            body = _Moved(features, target, source, z.shape)
            return SplitModel(body, _Moved(last, source, target, logits.shape))
    return None


def _equal_values(a: Tensor, b: Tensor) -> bool:
    """Return whether `a` has the values of `b` in their order, in any shape."""
    return a.numel() == b.numel() and _close(a.reshape(b.shape), b)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5, equal_nan=True)


def _obstacle(module: nn.Module, x: Tensor) -> str | None:
    """Return why outputs of `module` for the inputs `x` cannot be compared, or None if they can."""
    given = x.clone()
    first = dry_run(module, x)
    if not torch.equal(x, given):
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
    before: OrderedDict[str, nn.Module] = OrderedDict()
    after = layers.copy()
    while last not in before:
        name, layer = after.popitem(last=False)
        before[name] = layer
    head: nn.Module = nn.Sequential(after)
    if len(after) == 1:
        (head,) = after.values()
    return SplitModel(nn.Sequential(before), head, shape)


class _Moved(nn.Module):
    """A module that returns logits alone, with another order of axes, or in a `shape`; its first axis is free."""

    def __init__(self, module: nn.Module, source: int, target: int, shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.module = module
        self.axes = (source, target)
        self.shape: tuple[int, ...] | None = None
        if shape is not None:
            self.shape = tuple(shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = logits_of(self.module(x)).movedim(*self.axes)
        if self.shape is None:
            return outputs
        return outputs.reshape(len(x), *self.shape)
