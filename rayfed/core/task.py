"""What is learned, apart from how: the network, its loss, its split into features and head, and its batch norm."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayfed.core.batch_norm import batch_norm_names, batch_norm_statistics
from rayfed.core.network import Network, gradients, weights_of
from rayfed.core.trees import Weights, only

BATCH_NORM_POLICIES = ("aggregate", "local", "local_statistics", "frozen")


class Batch(NamedTuple):
    """Examples ready for the network: `x` [batch, ...] float and normalised, `y` [batch] classes (or soft labels)."""

    x: Tensor
    y: Tensor


class InputSpec(NamedTuple):
    """What inputs look like: their shape, how uint8 images were normalised, per channel in units of [0, 1], and whether
    they are real numbers in the end (not those of words)."""

    shape: tuple[int, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    continuous: bool = True


UNKNOWN_INPUTS = InputSpec()


class Output(NamedTuple):
    """`logits` [batch, classes], `features` [batch, *feature_shape] at the split, and the buffers after the call."""

    logits: Tensor
    features: Tensor
    buffers: Weights


LossTerm = Callable[[Tensor, Weights, Output], tuple[Tensor, Output]]
"""What a wrapper adds to a task's objective: (loss so far, weights, output) -> (loss, output)."""


class Task:
    """The network as a template (its weights travel separately), the loss, and how many clients and classes there are.

    Args:
        model: a module with `features` and `head`, forward being their composition; it also fixes the initial weights.
        loss: (logits [batch, classes], y [batch]) -> scalar mean over the batch.
        batch_norm: `aggregate` averages batch-norm layers, running statistics included; `local` leaves them with
            the client; `local_statistics` averages the affine part alone; `frozen` neither trains nor updates them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        num_clients: int,
        num_classes: int,
        batch_norm: str = "aggregate",
        device: str | torch.device = "cpu",
        inputs: InputSpec = UNKNOWN_INPUTS,
    ):
        self.device = torch.device(device)
        self.channels_last = any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())
        self.loss, self.num_clients, self.num_classes = loss, num_clients, num_classes
        self.batch_norm, self.inputs = batch_norm, inputs
        self.modules: dict[str, Network] = {}
        self.loss_terms: tuple[LossTerm, ...] = ()
        # a copy of its own: two templates round one module would change its training mode behind each other's back
        self._set_model(copy.deepcopy(model).to(self.device))

    def _set_model(self, model: nn.Module) -> None:
        self.model = Network(model, frozen_batch_norm=self.batch_norm == "frozen")
        self.feature_shape = tuple(getattr(model, "feature_shape", ()))
        self._initial = self.to_memory_format(weights_of(model))
        layers, statistics = batch_norm_names(model), batch_norm_statistics(model)
        self.batch_norm_names = layers
        kept = {"local": layers, "local_statistics": statistics}
        self.personal_names: frozenset[str] = frozenset(kept.get(self.batch_norm, ()))
        frozen = layers if self.batch_norm == "frozen" else frozenset()
        self.trainable = tuple(name for name in self.model.parameters if name not in frozen)
        self.head_names = _head_names(model, self.feature_shape)

    def with_modules(self, modules: Mapping[str, nn.Module]) -> "Task":
        """The same task with the algorithm's further networks at `task.modules`."""
        task = copy.copy(self)
        task.modules = {name: Network(module.to(self.device)) for name, module in modules.items()}
        return task

    def with_model(self, model: nn.Module, *, personal_names: Any = ()) -> "Task":
        """The same task for another network (a wrapper's, round the original), whose `personal` names never travel."""
        task = copy.copy(self)
        task._set_model(copy.deepcopy(model).to(self.device))
        task.personal_names |= self.personal_names | frozenset(personal_names)
        return task

    def with_loss_term(self, term: LossTerm) -> "Task":
        """The same task with one more term in its objective."""
        task = copy.copy(self)
        task.loss_terms = (*self.loss_terms, term)
        return task

    def to_memory_format(self, tree: Any) -> Any:
        """`tree` with convolution weights in channels-last order, which runs 1.2 to 1.7 times as fast on a CPU."""
        if not self.channels_last:
            return tree
        if isinstance(tree, Tensor):
            # `to`, not `contiguous`: with one channel the latter leaves strides by which torch picks the slow kernels
            return tree.to(memory_format=torch.channels_last) if tree.dim() == 4 else tree
        if isinstance(tree, dict):
            return {key: self.to_memory_format(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            return type(tree)(self.to_memory_format(value) for value in tree)
        return tree

    def initial_weights(self) -> Weights:
        """The common initial weights: fixed by the model's own, the same for server and clients. Do not change them."""
        return dict(self._initial)

    def forward(self, weights: Weights, x: Tensor, *, train: bool = True) -> Output:
        def split(model: Any) -> tuple[Tensor, Tensor]:
            features = model.features(x)
            return model.head(features), features

        (logits, features), buffers = self.model.run(weights, split, train=train)
        return Output(logits, features, buffers)

    def head(self, weights: Weights, features: Tensor, *, train: bool = True) -> Tensor:
        """Logits [batch, classes] of `features` [batch, *feature_shape]; the buffers that change are dropped."""
        return self.model.run(weights, lambda model: model.head(features), train=train)[0]

    def objective(self, weights: Weights, batch: Batch) -> tuple[Tensor, Output]:
        """The loss of `weights` on `batch` in training mode, and the wrappers' terms (DBE's mean regulariser)."""
        output = self.forward(weights, batch.x)
        return self.add_loss_terms(self.loss(output.logits, batch.y), weights, output)

    def add_loss_terms(self, loss: Tensor, weights: Weights, output: Output) -> tuple[Tensor, Output]:
        """`loss`, of an objective of the algorithm's own, with the wrappers' terms on top."""
        for term in self.loss_terms:
            loss, output = term(loss, weights, output)
        return loss, output

    def without_loss_terms(self) -> "Task":
        """The same task without the wrappers' terms: for models beside the one that they are about."""
        task = copy.copy(self)
        task.loss_terms = ()
        return task

    def gradients(self, weights: Weights, batch: Batch, names: Any = None) -> tuple[Weights, Tensor, Weights]:
        """(gradients of `objective` for `names` (default: all trainable), loss, buffers after the step)."""

        def loss(trained: Weights) -> tuple[Tensor, Weights]:
            value, output = self.objective(weights | trained, batch)
            return value, output.buffers

        return gradients(loss, only(weights, self.trainable if names is None else names))

    @torch.no_grad()
    def predict(self, weights: Weights, x: Tensor) -> Tensor:
        """Logits [batch, classes] in evaluation mode."""
        return self.model(weights, x, train=False)[0]

    @torch.no_grad()
    def represent(self, weights: Weights, x: Tensor) -> Tensor:
        """Features [batch, *feature_shape] in evaluation mode."""
        return self.model.run(weights, lambda model: model.features(x), train=False)[0]


def _head_names(model: nn.Module, feature_shape: tuple[int, ...]) -> frozenset[str]:
    """Parameters that `model.head` uses, and the buffers beside them: autograd tells, whatever their names."""
    if not feature_shape:
        return frozenset()
    named = dict(model.named_parameters())
    device = next(iter(named.values())).device
    features = torch.zeros((2, *feature_shape), device=device)
    model.eval()  # batch norm in the head would note the zeros
    with torch.enable_grad():
        logits = model.head(features)  # type: ignore[operator]
        if not logits.requires_grad:
            return frozenset()
        found = torch.autograd.grad(logits.sum(), list(named.values()), allow_unused=True)
    used = {name for name, grad in zip(named, found, strict=True) if grad is not None}
    owners = {name.rpartition(".")[0] for name in used}
    return frozenset(used | {name for name, _ in model.named_buffers() if name.rpartition(".")[0] in owners})
