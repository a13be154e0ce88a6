"""The learning task, independent of the algorithm: the network, its loss, its split and its batch-norm policy."""

import copy
import fnmatch
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rayfed.core.batch import Batch as Batch
from rayfed.core.errors import BadHook, UsageError
from rayfed.core.example_losses import ExampleLosses, example_losses, has_example_losses
from rayfed.core.modules import (
    batch_norm_names,
    batch_norm_statistics,
    constant_names,
    copied,
    has_convolutions,
    unchanged,
)
from rayfed.core.network import Network, logits_of
from rayfed.core.outputs import CLASSES, Outputs, labels_without_loss, with_loss
from rayfed.core.private_gradients import batch_gradients
from rayfed.core.trees import Weights, only


class InputSpec(NamedTuple):
    """Description of the network's inputs.

    Attributes:
        shape: Shape of one input.
        mean, std: Normalisation of uint8 images, per channel, in units of [0, 1].
        continuous: Whether the inputs are real-valued; False for token numbers.
    """

    shape: tuple[int, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    continuous: bool = True


UNKNOWN_INPUTS = InputSpec()


class Output(NamedTuple):
    """Output of the network.

    Attributes:
        logits: [batch, classes].
        features: Representations at the split, float32 [batch, *feature_shape]; empty if the model has no split.
        buffers: Buffers after the call.
    """

    logits: Tensor
    features: Tensor
    buffers: Weights


Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [batch, classes], y [batch]) -> mean over the batch, a scalar."""

_moved: MutableMapping[Any, dict[Any, Tensor]] = WeakTensorKeyDictionary()
"""Constants by the tensor that they are copies of, by their device and memory format."""

_heads: MutableMapping[nn.Module, tuple[frozenset[str], int]] = WeakKeyDictionary()
"""What `_head` returns, by the model, since that takes a gradient; copies of a model have the same head."""

LossTerm = Callable[[Tensor, Weights, Output], tuple[Tensor, Output]]
"""A term that a wrapper adds to the objective: (loss so far, weights, output) -> (loss, output)."""


class Task:
    """The network as a template without weights, the loss, and the numbers of clients and classes.

    Args:
        model: A module. If it has a `feature_shape`, its forward pass is the composition of its `features` and `head`.
            Its weights are the initial weights. The task shares tensors that have its device and format already;
            nobody may change them.
        loss: Function (logits [batch, classes], y [batch]) -> mean over the batch, a scalar.
        num_clients: Number of clients that take part in training.
        num_classes: Number of classes.
        batch_norm: Policy for batch-norm layers. `aggregate` averages them, including running statistics; `local`
            keeps them on the client; `local_statistics` averages the affine parameters only; `frozen` neither trains
            nor updates them.
        device: Device of the network.
        inputs: Description of the inputs.
        scoring_loss: The loss by which models are scored, if another loss trains them.
        outputs: The meaning of the outputs; see `rayfed.core.outputs`.
        rows_interact: Whether an example's output depends on the others in its batch, also in evaluation mode.
        personal: Patterns of the names of weights that stay on the client, such as "*.lora_B.*".

    Attributes:
        model: The network.
        modules: Additional networks of the algorithm, by name.
        feature_shape: Shape of one representation at the split; empty if the model has no split.
        feature_dtype: The type in which the head takes representations. Methods see them as float32.
        trainable: Names of the parameters that are trained, those of the loss included.
        parameters, buffers: Names of the parameters and buffers that are weights, those of the loss included. The
            constants of the network are none; see `rayfed.core.modules.constant_names`.
        loss_names: Names of the parameters and buffers of the loss, which begin with `loss.`.
        batch_norm_names: Names of the parameters and buffers of batch-norm layers.
        head_names: Names of the parameters and buffers of the head.
        without_loss: Labels that the loss leaves out of its mean, so that a batch of them alone has no loss.
        num_outputs: Number of classes for which the model has an output, at least `num_classes`.
        personal_names: Names of the weights that stay on the client with every algorithm.
        added_names: The personal names that a wrapper added to the network; they belong to neither body nor head.
        loss_terms: Terms that wrappers add to the objective.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        num_clients: int,
        num_classes: int,
        batch_norm: str = "aggregate",
        device: str | torch.device = "cpu",
        inputs: InputSpec = UNKNOWN_INPUTS,
        scoring_loss: Loss | None = None,
        outputs: Outputs = CLASSES,
        rows_interact: bool = False,
        personal: Sequence[str] = (),
        channels_last: bool = True,
    ):
        self.device = torch.device(device)
        self.channels_last = channels_last and has_convolutions(model)
        self.num_clients = num_clients
        self.num_classes = num_classes
        self._loss = loss_on(self.device, loss)
        if scoring_loss is None:
            self._scoring_loss = self._loss
        else:
            self._scoring_loss = loss_on(self.device, scoring_loss)
        self.without_loss = labels_without_loss(self._loss, outputs)
        self._learned_loss: Network | None = None
        if isinstance(self._loss, nn.Module):
            network = Network(nn.ModuleDict({"loss": self._loss}))
            own = not type(self._loss).__module__.startswith("torch.")  # the buffers of torch's losses do not change
            if network.parameters or (own and network.buffers):
                self._learned_loss = network
            else:
                self._learned_loss = None
        self.batch_norm = batch_norm
        self.inputs = inputs
        self.outputs = outputs
        self.rows_interact = rows_interact
        self.modules: dict[str, Network] = {}
        self.loss_terms: tuple[LossTerm, ...] = ()
        self.added_names: frozenset[str] = frozenset()
        self._set_model(model)
        for pattern in personal:
            before = {name: name.removeprefix("features.") for name in self._initial}  # the model was split
            names = set()
            for name, own_name in before.items():
                if fnmatch.filter((name, own_name), pattern):
                    names.add(name)
            if not names:
                known = ", ".join(list(self._initial)[:4])
                raise UsageError(f"algorithm.personal={pattern}: matches no weight of the model, such as {known}")
            self.personal_names |= names

    def _set_model(self, source: nn.Module) -> None:
        model = self._here(source)
        self.model = Network(model, frozen_batch_norm=self.batch_norm == "frozen")
        self.feature_shape = tuple(getattr(model, "feature_shape", ()))
        self.feature_dtype = getattr(model, "feature_dtype", torch.get_default_dtype())
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        # `data`, unlike `detach`, has a counter of changes of its own: the module's tensors take clients' weights
        names = self.model.parameters + self.model.buffers
        self._initial = {name: named[name].data for name in names}
        finite = {}
        for name, value in self._initial.items():
            finite[name] = torch.isfinite(value)
        self._not_finite = {}
        for name, mask in finite.items():
            if not mask.all():
                self._not_finite[name] = ~mask
        layers = batch_norm_names(model).intersection(self._initial)
        statistics = batch_norm_statistics(model).intersection(self._initial)
        self.batch_norm_names = layers
        local = {"local": layers, "local_statistics": statistics}
        self.personal_names: frozenset[str] = local.get(self.batch_norm, frozenset())
        self.parameters = self.model.parameters
        self.buffers = self.model.buffers
        self.loss_names = frozenset[str]()
        if self._learned_loss is not None:
            self._add_loss(self._learned_loss, named)
        self.trainable = self.parameters
        if source not in _heads:
            _heads[source] = _head(model, self.feature_shape, self.feature_dtype)
        of_head, width = _heads[source]
        self.head_names = of_head.intersection(self._initial)
        self.num_outputs = self.num_classes
        if self.outputs.kind == "classes":
            self.num_outputs = max(self.num_classes, width)

    def _add_loss(self, network: Network, named: Mapping[str, Tensor]) -> None:
        """Let the weights of a loss be trained beside those of the model, which are `named`."""
        self.loss_names = frozenset((*network.parameters, *network.buffers))
        clash = self.loss_names & named.keys()
        if clash:
            raise UsageError(f"loss: its {min(clash)} is also the name of a weight of the model; rename that")
        own = dict(network.module.named_parameters()) | dict(network.module.named_buffers())
        for name in network.parameters + network.buffers:
            self._initial[name] = own[name].data
        self.parameters = self.parameters + network.parameters
        self.buffers = self.buffers + network.buffers

    def _here(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model`, whose modules are new and whose tensors are shared where they lie right already.

        Two templates that share a module would switch each other's training mode. Constants that do not lie right are
        moved once for all tasks of the process.
        """
        fixed = constant_names(model, frozen_batch_norm=self.batch_norm == "frozen")
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        constants = set()
        for name, value in named.items():
            if name in fixed:
                constants.add(id(value))

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) in constants:
                elsewhere = _moved.setdefault(tensor, {})
            else:
                elsewhere = {}
            where = self.device, self.channels_last
            if where not in elsewhere:
                elsewhere[where] = self.to_memory_format(tensor.detach().to(self.device))
            return elsewhere[where]

        here: dict[int, Tensor] = {}
        for parameter in model.parameters():
            here[id(parameter)] = nn.Parameter(moved(parameter), parameter.requires_grad)
        for buffer in model.buffers():
            here[id(buffer)] = moved(buffer)
        return copied(model, here).to(self.device)  # TorchScript copies its tensors

    def with_modules(self, modules: Mapping[str, nn.Module]) -> "Task":
        """Return a copy of the task with additional networks of the algorithm in `task.modules`."""
        task = copy.copy(self)
        task.modules = {}
        for name, module in modules.items():
            task.modules[name] = Network(module.to(self.device))
        return task

    def with_model(self, model: nn.Module, *, personal_names: Iterable[str] = ()) -> "Task":
        """Return a copy of the task with another network, such as a wrapper round the original.

        Weights in `personal_names` were added to the network. They stay on the client, in addition to those of the
        present task.
        """
        task = copy.copy(self)
        task._set_model(model)
        task.added_names = self.added_names | frozenset(personal_names)
        task.personal_names |= self.personal_names | task.added_names
        return task

    def with_loss_term(self, term: LossTerm) -> "Task":
        """Return a copy of the task with one more term in its objective."""
        task = copy.copy(self)
        task.loss_terms = (*self.loss_terms, term)
        return task

    def to_memory_format(self, tree: Any) -> Any:
        """Return `tree` with convolution weights in channels-last memory format where that is faster."""
        if not self.channels_last:
            return tree
        if isinstance(tree, Tensor):
            # Use `to`, not `contiguous`: with one channel the latter leaves strides for which torch picks slow kernels.
            if tree.dim() == 4:
                return tree.to(memory_format=torch.channels_last)
            return tree
        if isinstance(tree, dict):
            return {key: self.to_memory_format(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            return type(tree)(map(self.to_memory_format, tree))
        return tree

    def initial_weights(self) -> Weights:
        """Return the initial weights, shared by the server and all clients. Do not modify the tensors."""
        return dict(self._initial)

    @property
    def training_loss(self) -> Loss:
        """The loss by which models are trained, on the device of the task."""
        return self._loss

    @property
    def untrained(self) -> frozenset[str]:
        """The names of buffers, those of `modules` included."""
        buffers = set(self.buffers)
        for network in self.modules.values():
            buffers.update(network.buffers)
        return frozenset(buffers)

    def is_finite(self, path: str, tensor: Tensor) -> bool:
        """Return whether a tensor of a state is finite, apart from what was not at first, such as a mask of -inf."""
        finite = torch.isfinite(tensor)
        if bool(finite.all()):
            return True
        for name, mask in self._not_finite.items():
            if f".{path}".endswith(f".{name}") and bool((finite | mask).all()):
                return True
        return False

    def forward(self, weights: Weights, x: Tensor, *, train: bool = True) -> Output:
        """Run the network on `x` [batch, ...] in training or evaluation mode."""

        def split(model: Any) -> tuple[Tensor, Tensor]:
            if not self.feature_shape:
                logits = logits_of(model(x))
                return logits, logits.new_empty(0)
            features = model.features(x)
            return model.head(features), features.float()

        (logits, features), buffers = self.model.run(weights, split, train=train)
        return Output(logits, features, buffers)

    def head(self, weights: Weights, features: Tensor, *, train: bool = True) -> Tensor:
        """Return the logits [batch, classes] for `features` [batch, *feature_shape]; discard changes to buffers."""
        features = features.to(self.feature_dtype)
        logits: Tensor
        logits, _ = self.model.run(weights, lambda model: model.head(features), train=train)
        return logits

    def objective(self, weights: Weights, batch: Batch) -> tuple[Tensor, Output]:
        """Return the training loss on `batch` with the wrappers' terms (DBE's mean regulariser), and the output."""
        output = self.forward(weights, batch.x)
        loss, output = self.loss_of(weights, output, batch.y, output.logits)
        return self.add_loss_terms(loss, weights, output)

    def loss_of(self, weights: Weights, output: Output, y: Tensor, logits: Tensor) -> tuple[Tensor, Output]:
        """Return the training loss of `logits`, and `output` with the buffers of the loss after it."""
        loss, buffers = self._measured(self._loss, logits, y, weights)
        if buffers:
            output = output._replace(buffers=output.buffers | buffers)
        return loss, output

    def loss(self, outputs: Tensor, y: Tensor, weights: Any = None) -> Tensor:
        """Return the loss by which models are trained, a scalar.

        Args:
            outputs: Outputs of the model [batch, ...], for the labels `y` [batch, ...].
            weights: The weights of the model, or a tree with them, in which a loss finds its own parameters.
        """
        return self._measured(self._loss, outputs, y, weights)[0]

    def scoring_loss(self, outputs: Tensor, y: Tensor, weights: Any = None) -> Tensor:
        """Return the loss by which models are scored, a scalar; the arguments are those of `loss`."""
        return self._measured(self._scoring_loss, outputs, y, weights, train=False)[0]

    def example_losses(self, outputs: Tensor, y: Tensor) -> ExampleLosses | None:
        """Return the scoring loss of each example; None where it is not known to be a mean over examples."""
        if self._learned_loss is not None:
            return None
        return example_losses(self._scoring_loss, outputs, y)

    def has_example_losses(self, outputs: Tensor, y: Tensor) -> bool:
        """Return whether `example_losses` returns losses; nothing is computed."""
        return self._learned_loss is None and has_example_losses(self._scoring_loss, outputs, y)

    def _measured(
        self, loss: Loss, outputs: Tensor, y: Tensor, weights: Any, *, train: bool = True
    ) -> tuple[Tensor, Weights]:
        """Return the value of a loss, and its buffers after the call; the loss of labels that all do not count is 0."""
        if not self.without_loss or y.is_floating_point():
            return self._value(loss, outputs, y, weights, train=train)
        y, counts = with_loss(y, self.without_loss)
        value, buffers = self._value(loss, outputs, y, weights, train=train)
        return value * counts, buffers

    def _value(self, loss: Loss, outputs: Tensor, y: Tensor, weights: Any, *, train: bool) -> tuple[Tensor, Weights]:
        if not is_known_loss(loss):  # which may change what it is given in place
            outputs = outputs.clone()
            y = y.clone()
        network = self._learned_loss
        if network is None:
            return loss(outputs, y), {}
        for own in _dicts(weights):
            if self.loss_names <= own.keys():
                return network.run(own, lambda module: module["loss"](outputs, y), train=train)
        raise BadHook(f"loss: has parameters ({min(self.loss_names)}), which are not among the weights of this method")

    def add_loss_terms(self, loss: Tensor, weights: Weights, output: Output) -> tuple[Tensor, Output]:
        """Add the wrappers' terms to `loss`, the value of an algorithm's own objective; return it and the output."""
        for term in self.loss_terms:
            loss, output = term(loss, weights, output)
        return loss, output

    def without_loss_terms(self) -> "Task":
        """Return a copy of the task without the wrappers' terms, for models that these terms do not apply to."""
        task = copy.copy(self)
        task.loss_terms = ()
        return task

    def gradients(
        self, weights: Weights, batch: Batch, names: Container[str] | None = None
    ) -> tuple[Weights, Tensor, Weights]:
        """Differentiate the objective on `batch` with respect to `names` (default: all trainable parameters).

        Returns:
            The gradients, the loss and the buffers after the step.
        """

        def loss(trained: Weights, batch: Batch) -> tuple[Tensor, Weights]:
            value, output = self.objective(weights | trained, batch)
            return value, output.buffers

        if names is None:
            names = self.trainable
        return batch_gradients(loss, only(weights, names), batch)

    @torch.no_grad()
    def predict(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the logits [batch, classes] in evaluation mode."""
        logits: Tensor = logits_of(self.model(weights, x, train=False)[0])
        return logits

    @torch.no_grad()
    def represent(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the features, float32 [batch, *feature_shape], in evaluation mode."""
        features: Tensor
        features, _ = self.model.run(weights, lambda model: model.features(x), train=False)
        return features.float()


def is_known_loss(loss: Loss) -> bool:
    """Return whether a loss is torch's or rayfed's, with fixed options or not, and no code of the user's."""
    if isinstance(loss, functools.partial):
        inner = loss.func
    else:
        inner = loss
    module: str = getattr(inner, "__module__", None) or ""
    return module.startswith(("torch.", "rayfed."))


def loss_on(device: str | torch.device, loss: Loss) -> Loss:
    """Return `loss` with its tensors on `device`, such as the weights of classes; the caller's are not moved."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).to(device)
    if isinstance(loss, functools.partial):
        options = {}
        for key, v in loss.keywords.items():
            if isinstance(v, Tensor):
                options[key] = v.to(device)
            else:
                options[key] = v
        return functools.partial(loss_on(device, loss.func), *loss.args, **options)
    return loss


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts of a tree, the outer ones first."""
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _dicts(value)


def _head(model: nn.Module, feature_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[frozenset[str], int]:
    """Return the names of the parameters that `model.head` uses, found by autograd, and of the buffers beside them.

    The number of its outputs is returned, too; that of the whole model if there is no head.
    """
    if not feature_shape:
        return frozenset(), getattr(model, "output_width", 0)
    named = dict(model.named_parameters())
    device = next(iter(named.values())).device
    features = torch.zeros((2, *feature_shape), device=device, dtype=dtype)
    model.eval()  # batch norm in the head must not update its statistics
    frozen = []
    for value in named.values():
        if value.is_floating_point() and not value.requires_grad:
            frozen.append(value)
    named = {name: value for name, value in named.items() if value.is_floating_point()}
    with torch.enable_grad(), unchanged(model):
        for value in frozen:
            value.requires_grad_(True)
        try:
            logits = model.head(features)  # type: ignore[operator]
            width = 1
            if logits.ndim > 1:
                width = logits.shape[-1]
            if not logits.requires_grad:
                return frozenset(), width
            tensors = list(named.values())
            grads = torch.autograd.grad(logits.sum(), tensors, allow_unused=True)
        finally:
            for value in frozen:
                value.requires_grad_(False)
    used = set()
    for name, grad in zip(named, grads, strict=True):
        if grad is not None:
            used.add(name)
    owners = {_owner(name) for name in used}
    for name, _ in model.named_buffers():
        if _owner(name) in owners:
            used.add(name)
    return frozenset(used), width


def _owner(name: str) -> str:
    """Return the name of the layer that has a parameter or buffer, also if the latter belongs to a parametrisation."""
    if ".parametrizations." in name:
        return name.partition(".parametrizations.")[0]
    return name.rpartition(".")[0]
