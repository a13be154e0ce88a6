"""Networks as functions of explicit weights, and gradients for one client at a time or under `torch.vmap`."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.modules import (
    batch_norm_layers,
    batch_norm_statistics,
    constant_names,
    copied,
    set_singular_vectors,
    spectral_layers,
)
from rayfed.core.trees import Weights, detach, only, without

_vectorised = False
_left: "list[Network] | None" = None
"""The networks in which the weights of the last step were left; None outside of `weights_stay`."""
_backward: "list[Network] | None" = None
"""The networks that hold the weights they ran with until the backward pass is over; None outside of `gradients`.

Some code reads the weights of a layer in the backward pass: checkpoints, which compute the forward pass again, hooks of
layers and of tensors, and autograd functions. It must find the weights of the forward pass.
"""


@contextmanager
def vectorised() -> Iterator[None]:
    """Mark a block in which steps run under `torch.vmap`, where gradients must come from `torch.func`."""
    global _vectorised
    previous = _vectorised
    _vectorised = True
    try:
        yield
    finally:
        _vectorised = previous


def is_vectorised() -> bool:
    """Return whether the caller is inside a `vectorised` block."""
    return _vectorised


@contextmanager
def weights_stay() -> Iterator[None]:
    """Leave the weights of a step in its networks until the end of the block, since the next step replaces them.

    Putting the modules' own tensors back after each step would take some percent of a step of a small network.
    """
    global _left
    outer = _left
    _left = []
    try:
        yield
    finally:
        put_left_back()
        _left = outer


def put_left_back() -> None:
    """Put back now what `weights_stay` has left in networks, for those who look at modules between two steps."""
    if _left is None:
        return
    for network in _left:
        network.put_back()
    _left.clear()


def _contiguous_under_vmap(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Change the memory format of a layer's inputs where torch's kernel for channels-last cannot be vectorised."""
    if not _vectorised:
        return None
    return tuple(x.contiguous() for x in inputs)


class _Slot(NamedTuple):
    """A place of a tensor in a module.

    Attributes:
        table, name: The tensor is `table[name]`, in the dictionary of a layer's parameters or buffers.
        key: The name of the weight that takes this place. Tied weights take several places under their first name.
        tensor: The module's own tensor.
        values: The values of `tensor` when no weights are in place.
    """

    table: dict[str, Any]
    name: str
    key: str
    tensor: Tensor
    values: Tensor


class _Run(NamedTuple):
    """What a module runs with: all weights with copies of the buffers, and the mode."""

    weights: Weights
    train: bool


class Network:
    """A module used as a template: `network(weights, x)` runs it with the given weights and has no side effects.

    The weights are placed directly in the module's parameter and buffer dictionaries. That takes a tenth of the time
    that `torch.func.functional_call` adds to a step of a small network. This also works under `torch.vmap`. Without it,
    the module's own tensors get the same values, so that everything else that holds them (lists, closures, hooks)
    computes with these values, too.

    Args:
        module: The template. The network takes it over; do not use it elsewhere.
        frozen_batch_norm: Keep batch-norm layers in evaluation mode during training, and their tensors as constants.

    Attributes:
        parameters, buffers: The names of the weights that the network is run with.
        constants: The tensors that stay in the module, by name; see `constant_names`. Nobody may modify them.
    """

    def __init__(self, module: nn.Module, *, frozen_batch_norm: bool = False):
        self.module = module
        if frozen_batch_norm:
            self._frozen = batch_norm_layers(module)
        else:
            self._frozen = []
        self._training: bool | None = None
        parameters: Weights = dict(module.named_parameters())
        buffers: Weights = dict(module.named_buffers())
        named = parameters | buffers
        fixed = constant_names(module, frozen_batch_norm=frozen_batch_norm)
        self.constants = detach(only(named, fixed))
        self.parameters = tuple(without(parameters, fixed))
        self.buffers = tuple(without(buffers, fixed))
        self._slots = _slots(module, named, fixed)
        self._own = {slot.key: slot.tensor for slot in self._slots}
        self._at_rest = {slot.key: slot.values for slot in self._slots}
        self._buffer_slots = [slot for slot in self._slots if slot.key in buffers]
        self._spectral_layers = spectral_layers(module)
        self._read_only = batch_norm_statistics(module)  # in evaluation mode
        self._held: _Run | None = None
        self._other: Network | None = None  # for other weights, while this one holds some
        self._written: dict[bool, list[str]] = {}  # the parameters that a forward pass changes, by its mode
        for layer in module.modules():
            if isinstance(layer, nn.GroupNorm):
                layer.register_forward_pre_hook(_contiguous_under_vmap)

    def run(self, weights: Weights, fn: Callable[[Any], Any], *, train: bool = True) -> tuple[Any, Weights]:
        """Call `fn(module)` with `weights` in the module; return its result and the buffers after the call.

        `fn` may change buffers, which are copies, in place, or assign others. It changes `weights` only in training,
        if the forward pass itself writes to parameters (an embedding with `max_norm`).
        """
        in_training = _backward is not None and self._differentiates(weights)
        if in_training and self._holds_others(weights):
            return self._second().run(weights, fn, train=train)
        buffers = self._copied_buffers(weights, train=train)
        if buffers:
            weights = weights | buffers
        placed = _Run(weights, train)
        if in_training:
            self._hold(placed)
        elif not _vectorised:
            placed = self._protected(placed)
        self._place(placed)
        try:
            result = fn(self.module)
            self._take_assigned(buffers)
            if not in_training and not _vectorised:
                self._notice_writes(placed)
            return result, buffers
        finally:
            if self._held is None:
                self.put_back()
            elif self._held is not placed:
                self._place(self._held)

    def _copied_buffers(self, weights: Weights, *, train: bool) -> Weights:
        """Return the buffers for a forward pass: copies, except of those that it only reads."""
        shared = frozenset[str]()
        if not train:
            shared = self._read_only
        buffers = {}
        for name in self.buffers:
            if name in shared:
                buffers[name] = weights[name]
            else:
                buffers[name] = weights[name].clone()
        return buffers

    def _take_assigned(self, buffers: Weights) -> None:
        """Put into `buffers` what the forward pass has assigned in their place."""
        for table, name, key, _, _ in self._buffer_slots:
            if name not in table:  # TorchScript has tables without `get`
                continue
            value = table[name]
            if value is not buffers[key] and isinstance(value, Tensor):
                buffers[key] = value.detach()

    def _place(self, run: _Run) -> None:
        """Place weights in the module, and set its mode."""
        if self._training is not run.train:
            self.module.train(run.train)
            for layer in self._frozen:
                layer.eval()
            self._training = run.train
        weights = run.weights
        for table, name, key, _, _ in self._slots:
            table[name] = weights[key]
        self._fill(weights)

    def put_back(self) -> None:
        """Place the module's own tensors in it, with their own values."""
        for table, name, _, tensor, _ in self._slots:
            table[name] = tensor
        self._fill(self._at_rest)

    def _fill(self, weights: Weights) -> None:
        """Give the module's own tensors the values of `weights`.

        Under `torch.vmap`, also one that a method uses itself, torch refuses that: they keep theirs.
        """
        if _vectorised:
            return
        try:  # which is faster than `suppress`, and each step comes here twice
            for name, tensor in self._own.items():
                tensor.data = weights[name]
        except RuntimeError:
            return

    def _differentiates(self, weights: Weights) -> bool:
        """Return whether gradients with respect to `weights` are wanted."""
        if not torch.is_grad_enabled():
            return False
        return any(weights[name].requires_grad for name in self.parameters)

    def _holds_others(self, weights: Weights) -> bool:
        """Return whether other weights are in place until the backward pass is over."""
        if self._held is None:
            return False
        held = self._held.weights
        return any(held[name] is not weights[name] for name in self.parameters)

    def _hold(self, run: _Run) -> None:
        """Let `run` be in place until the backward pass is over."""
        if self._held is None:
            assert _backward is not None, "only gradients hold weights"
            _backward.append(self)
        self._held = run

    def release(self) -> None:
        """Put the module's own tensors back, after the backward pass or at the end of `weights_stay`."""
        self._held = None
        if _left is None:
            self.put_back()
        elif self not in _left:
            _left.append(self)

    def _second(self) -> "Network":
        """Return a network with a copy of the module, for other weights in the same loss."""
        if self._other is None:
            at_rest: dict[int, Tensor] = {}
            for slot in self._slots:
                own: Tensor = slot.values.clone()
                if isinstance(slot.tensor, nn.Parameter):
                    own = nn.Parameter(own, slot.tensor.requires_grad)
                other = id(slot.table[slot.name])
                at_rest[id(slot.tensor)] = at_rest.setdefault(other, own)
            self._other = Network(copied(self.module, at_rest), frozen_batch_norm=bool(self._frozen))
        return self._other

    def own_parameters(self) -> list[Tensor]:
        """Return the module's own parameters, if weights are held in their place."""
        if self._held is None:
            return []
        return [tensor for tensor in self._own.values() if tensor.requires_grad]

    def held_in_place(self) -> list[tuple[str, Tensor]]:
        """Return the name and the weight that is held in the place of each of `own_parameters`."""
        if self._held is None:
            return []
        held = self._held.weights
        return [(name, held[name]) for name, tensor in self._own.items() if tensor.requires_grad]

    def _protected(self, run: _Run) -> _Run:
        """Return a run without gradients, with copies of the parameters that the forward pass writes to.

        The first run in each mode finds out which these are, on copies of all.
        """
        weights = run.weights
        written = self._written.get(run.train, self.parameters)
        if not written:
            return run
        copies = {}
        for name in written:
            copies[name] = weights[name].clone()
        return run._replace(weights=weights | copies)

    def _notice_writes(self, run: _Run) -> None:
        """Find out, after the first run in a mode, which parameters the forward pass writes to."""
        if run.train not in self._written:
            written = []
            for name in self.parameters:
                if run.weights[name]._version > 0:
                    written.append(name)
            self._written[run.train] = written

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
        initial = {}
        there = set(self.constants)
        for slot in self._slots:
            initial[slot.key] = slot.values
            if getattr(tree.get(slot.key), "shape", None) == slot.values.shape:  # a stack has another one
                there.add(slot.key)
        vectors = set[str]()
        for names, buffers in self._spectral_layers:
            if there.issuperset(names + buffers):
                vectors.update(buffers)
        if not vectors:
            return {key: self.consistent(value) for key, value in tree.items()}
        with torch.no_grad():
            _, after = self.run(initial | tree, set_singular_vectors, train=False)
        return tree | only(after, tree.keys() & vectors)

    def draw_weights(self) -> Weights:
        """Draw new initial weights from the CPU's generator, parameters first. The template is not modified."""
        devices = {}
        for slot in self._slots:
            devices[slot.key] = slot.values.device
        module = copied(self.module).cpu()
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # numbers are drawn in the order of memory
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()  # type: ignore[operator]
        drawn = {}
        for name, value in weights_of(module).items():
            if name in devices:
                drawn[name] = value.to(devices[name])
        return drawn


def _slots(module: nn.Module, named: Mapping[str, Tensor], fixed: Container[str]) -> list[_Slot]:
    """Return the places of all tensors of `module` but those that are `fixed`; `named` are all of its tensors."""
    first_name = {id(value): name for name, value in named.items()}
    slots = []
    for layer in module.modules():
        for table in (layer._parameters, layer._buffers):
            for name, value in table.items():
                if value is None or first_name[id(value)] in fixed:
                    continue
                key = first_name[id(value)]
                slots.append(_Slot(table, name, key, value, value.detach()))
    return slots


def logits_of(returned: Any) -> Any:
    """Return the logits in what a model returned: itself, its `logits`, or the first element of a tuple."""
    if isinstance(returned, Mapping):
        return returned.get("logits", returned)
    if not isinstance(returned, Tensor) and hasattr(returned, "logits"):
        return returned.logits
    if isinstance(returned, (tuple, list)) and returned:
        return returned[0]
    return returned


def weights_of(module: nn.Module) -> Weights:
    """Return detached copies of the parameters and then the buffers of `module`."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def gradients(
    loss: Callable[[Weights], tuple[Tensor, Any]], trained: Weights, *, create_graph: bool = False
) -> tuple[Weights, Tensor, Any]:
    """Differentiate a loss with respect to the weights `trained`.

    For one client at a time this is `torch.autograd.grad` on leaves, as fast as a plain training loop;
    `torch.func.grad` took 1.3 to 2 times as long. Under `torch.vmap` it is `torch.func`.

    Args:
        loss: Function of the weights that returns a scalar and an auxiliary tree.
        trained: The weights to differentiate with respect to.
        create_graph: Keep the graph, so that the gradients can be differentiated again.

    Returns:
        The gradients, the scalar and the auxiliary tree. The last two are detached unless `create_graph` is set.
    """
    global _backward
    outer = _backward
    networks: list[Network] = []
    if outer is not None:
        networks = outer
    _backward = networks
    try:
        if _vectorised:
            grads, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(trained)
            return grads, value, aux
        leaves = _leaves(trained, create_graph=create_graph)
        with torch.enable_grad():
            value, aux = loss(leaves)
            found = _derivatives(value, leaves, networks, create_graph=create_graph)
    finally:
        _backward = outer
        if outer is None:  # else the outer gradients still need the weights
            for network in networks:
                network.release()
    if create_graph:
        return found, value, aux
    return found, value.detach(), detach(aux)


def _leaves(trained: Weights, *, create_graph: bool) -> Weights:
    """Return tensors to differentiate with respect to; with `create_graph`, they may be part of a larger graph."""
    if not create_graph:
        return {name: value.detach().requires_grad_() for name, value in trained.items()}
    leaves = {}
    for name, value in trained.items():
        if value.requires_grad:
            leaves[name] = value
        else:
            leaves[name] = value.detach().requires_grad_()
    return leaves


def _derivatives(value: Tensor, leaves: Weights, networks: list[Network], *, create_graph: bool) -> Weights:
    """Return the derivatives of `value` with respect to those of `leaves` that it depends on.

    What holds a module's own tensor has used it in place of the weight, so both derivatives are summed.
    """
    if not leaves:
        return {}
    own: list[Tensor] = []
    for network in networks:
        own += network.own_parameters()
    grads = torch.autograd.grad(value, [*leaves.values(), *own], create_graph=create_graph, allow_unused=True)
    found = {name: grad for name, grad in zip(leaves, grads, strict=False) if grad is not None}
    of_own = grads[len(leaves) :]
    used = [grad for grad in of_own if grad is not None]
    if used:
        return _with_own(found, leaves, networks, of_own)
    return found


def _with_own(found: Weights, leaves: Weights, networks: Sequence[Network], of_own: Sequence[Tensor | None]) -> Weights:
    """Add to the derivatives `found` those with respect to modules' own tensors, which stand for the weights."""
    held: list[tuple[str, Tensor]] = []
    for network in networks:
        held += network.held_in_place()
    names = {id(leaf): name for name, leaf in leaves.items()}
    summed = dict(found)
    for (key, weight), grad in zip(held, of_own, strict=True):
        if grad is None:
            continue
        if weight.grad_fn is not None:
            raise UsageError(
                f"model: computes with {key} outside of the layer that has it, and this method trains a mixture of "
                "weights; read the weight from its layer, such as self.layer.weight"
            )
        leaf = names.get(id(weight))
        if leaf in summed:
            summed[leaf] = summed[leaf] + grad
        elif leaf is not None:
            summed[leaf] = grad
    return {name: summed[name] for name in leaves if name in summed}
