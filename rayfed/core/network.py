"""Networks as functions of explicit weights, and gradients for one client at a time or under `torch.vmap`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.core.modules import (
    batch_norm_layers,
    batch_norm_statistics,
    constant_names,
    copied,
    set_singular_vectors,
    spectral_layers,
)
from rayfed.core.trees import Weights, detach

_vectorised = False


@contextmanager
def vectorised() -> Iterator[None]:
    """Mark a block in which steps run under `torch.vmap`, where gradients must come from `torch.func`."""
    global _vectorised
    previous, _vectorised = _vectorised, True
    try:
        yield
    finally:
        _vectorised = previous


def _contiguous_under_vmap(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Change the memory format of a layer's inputs where torch's kernel for channels-last cannot be vectorised."""
    return tuple(x.contiguous() for x in inputs) if _vectorised else None


def is_vectorised() -> bool:
    """Return whether the caller is inside a `vectorised` block."""
    return _vectorised


class Network:
    """A module used as a template: `network(weights, x)` runs it with the given weights and has no side effects.

    The weights are placed directly in the module's parameter and buffer dictionaries, with a tenth of the overhead that
    `torch.func.functional_call` adds to a step of a small network. This also works under `torch.vmap`.

    Args:
        module: The template. The network takes it over; do not use it elsewhere.
        frozen_batch_norm: Keep batch-norm layers in evaluation mode during training, and their tensors as constants.

    Attributes:
        parameters, buffers: The names of the weights that the network is run with.
        constants: The tensors that stay in the module, by name; see `constant_names`. Nobody may modify them.
    """

    def __init__(self, module: nn.Module, *, frozen_batch_norm: bool = False):
        self.module = module
        self._frozen = batch_norm_layers(module) if frozen_batch_norm else []
        self._training: bool | None = None
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        fixed = constant_names(module, frozen_batch_norm=frozen_batch_norm)
        self.constants = {name: value.detach() for name, value in (parameters | buffers).items() if name in fixed}
        self.parameters = tuple(name for name in parameters if name not in fixed)
        self.buffers = tuple(name for name in buffers if name not in fixed)
        first_name = {id(value): name for name, value in (parameters | buffers).items()}
        # Tied weights appear in several slots under the first of their names.
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = [
            (table, name, first_name[id(value)], value)
            for layer in module.modules()
            for table in (layer._parameters, layer._buffers)
            for name, value in table.items()
            if value is not None and first_name[id(value)] not in fixed
        ]
        self._buffer_slots = [(table, name, key) for table, name, key, _ in self._slots if key in buffers]
        self._spectral_layers = spectral_layers(module)
        self._read_only = batch_norm_statistics(module)  # in evaluation mode
        for layer in module.modules():
            if isinstance(layer, nn.GroupNorm):
                layer.register_forward_pre_hook(_contiguous_under_vmap)

    def run(self, weights: Weights, fn: Callable[[Any], Any], *, train: bool = True) -> tuple[Any, Weights]:
        """Call `fn(module)` with `weights` in the module; return its result and the buffers after the call.

        `fn` may change buffers, which are copies, in place, or assign others. `weights` is not modified.
        """
        shared = () if train else self._read_only
        buffers = {name: weights[name] if name in shared else weights[name].clone() for name in self.buffers}
        if self._training is not train:
            self.module.train(train)
            for layer in self._frozen:
                layer.eval()
            self._training = train
        source = weights | buffers if buffers else weights
        for table, name, key, _ in self._slots:
            table[name] = source[key]
        try:
            result = fn(self.module)
            for table, name, key in self._buffer_slots:
                value = table[name] if name in table else None  # noqa: SIM401 - TorchScript's tables have no `get`
                if value is not buffers[key] and isinstance(value, Tensor):
                    buffers[key] = value.detach()
            return result, buffers
        finally:
            for table, name, _, original in self._slots:
                table[name] = original

    def __call__(self, weights: Weights, *args: Any, train: bool = True) -> tuple[Any, Weights]:
        """Run the forward pass of the module with `weights`; return the output and the buffers after the call."""
        return self.run(weights, lambda module: module(*args), train=train)

    def consistent(self, tree: Any) -> Any:
        """Return an averaged state in which the vectors of spectral normalisation belong to the averaged weights.

        They are set in every mapping of `tree` that has all weights of such a layer.
        """
        if not self._spectral_layers:
            return tree
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            return type(tree)(map(self.consistent, tree))
        if not isinstance(tree, dict):
            return tree
        initial = {name: value for _, _, name, value in self._slots}
        shapes = {name: getattr(value, "shape", None) for name, value in tree.items()}  # a stack has another one
        there = {name for name, value in initial.items() if shapes.get(name) == value.shape}
        there |= self.constants.keys()
        vectors = [buffers for names, buffers in self._spectral_layers if there.issuperset(names + buffers)]
        if not vectors:
            return {key: self.consistent(value) for key, value in tree.items()}
        with torch.no_grad():
            buffers = self.run(initial | tree, set_singular_vectors, train=False)[1]
        return tree | {name: buffers[name] for names in vectors for name in names if name in tree}

    def draw_weights(self) -> Weights:
        """Draw new initial weights from the CPU's generator, parameters first. The template is not modified."""
        devices = {name: value.device for _, _, name, value in self._slots}
        module = copied(self.module).cpu()
        for value in module.parameters():
            value.data = value.data.contiguous()  # numbers are drawn in the order of memory
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()  # type: ignore[operator]
        return {name: value.to(devices[name]) for name, value in weights_of(module).items() if name in devices}


def logits_of(returned: Any) -> Any:
    """Return the logits in what a model returned: itself, its `logits`, or the first element of a tuple."""
    if isinstance(returned, Mapping):
        return returned.get("logits", returned)
    if not isinstance(returned, Tensor) and hasattr(returned, "logits"):
        return returned.logits
    return returned[0] if isinstance(returned, (tuple, list)) and returned else returned


def weights_of(module: nn.Module) -> Weights:
    """Return detached copies of the parameters and then the buffers of `module`."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def gradients(
    loss: Callable[[Weights], tuple[Tensor, Any]], trained: Weights, *, create_graph: bool = False
) -> tuple[Weights, Tensor, Any]:
    """Differentiate a loss with respect to the weights `trained`.

    For one client at a time this is `torch.autograd.grad` on leaves, as fast as a plain training loop
    (`torch.func.grad` took 1.3 to 2 times as long). Under `torch.vmap` it is `torch.func`.

    Args:
        loss: Function of the weights that returns a scalar and an auxiliary tree.
        trained: The weights to differentiate with respect to.
        create_graph: Keep the graph, so that the gradients can be differentiated again.

    Returns:
        The gradients, the scalar and the auxiliary tree. The last two are detached unless `create_graph` is set.
    """
    if _vectorised:
        grads, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(trained)
        return grads, value, aux
    if create_graph:
        leaves = {name: v if v.requires_grad else v.detach().requires_grad_() for name, v in trained.items()}
    else:
        leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
    with torch.enable_grad():
        value, aux = loss(leaves)
        values = (
            torch.autograd.grad(
                value, list(leaves.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
            if leaves
            else ()
        )
    grads = dict(zip(leaves, values, strict=True))
    return (grads, value, aux) if create_graph else (grads, value.detach(), detach(aux))
