"""Networks that several methods build or train: multilayer perceptrons, projection heads, classifiers on the server."""

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import server_batches
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.core.errors import UsageError
from rayfed.core.modules import copied
from rayfed.core.network import Network, gradients
from rayfed.core.optim import SGD
from rayfed.core.task import Task
from rayfed.core.trees import Weights, clone, only, tensor_bytes, without


def mlp(widths: Sequence[int], *, linear: bool = False) -> nn.Sequential:
    """Return linear layers of the given widths (two or more) with ReLU between them; `linear` omits the ReLUs."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        if layers and not linear:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


class ConditionalNetwork(nn.Module):
    """Layers that take inputs [batch, width] joined with one-hot classes [batch, classes]; 0 classes: inputs alone."""

    def __init__(self, classes: int, layers: nn.Module):
        super().__init__()
        self.classes = classes
        self.layers = layers

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        labels = one_hot(y, self.classes)
        return self.layers(torch.cat([x, labels], 1))


class WrappedModel(nn.Module):
    """A model around `model`. Its weights keep their names; further weights are those of `extra`, under `name`.

    `model` is no child of this module, which would rename its weights. Both share the tables of parameters, buffers and
    children.
    """

    model: Any
    feature_shape: tuple[int, ...]

    def __init__(self, model: Any, name: str, extra: nn.Module):
        super().__init__()
        self.__dict__["model"] = model
        self._parameters = model._parameters
        self._buffers = model._buffers
        self.feature_shape = tuple(getattr(model, "feature_shape", ()))
        self.feature_dtype = getattr(model, "feature_dtype", torch.get_default_dtype())
        self.output_width = getattr(model, "output_width", 0)
        self._modules.update({**model._modules, name: extra})

    def train(self, mode: bool = True) -> Self:
        self.model.training = mode
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        return self.model.features(x)

    def head(self, features: Tensor) -> Tensor:
        return self.model.head(features)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class ModelWithProjection(nn.Module):
    """A model with an MLP of the features of `model` for its `features`, and with a linear `head`.

    MOON uses it, and FedDebias for the variant of Fig. 5(a).

    `model` is copied without the weights of its head: `unused` are their names. The `widths` of the MLP include those
    of its input and output.
    """

    def __init__(self, model: Any, widths: Sequence[int], classes: int, unused: frozenset[str]):
        super().__init__()
        constants = {id(value): value for value in model.parameters() if not value.requires_grad}
        self.model: Any = copied(model, constants)
        for name in unused - tied_names(self.model):  # the features may use tied weights
            module_name, _, weight_name = name.rpartition(".")
            module = self.model.get_submodule(module_name)
            table = module._parameters if weight_name in module._parameters else module._buffers
            table[weight_name] = None
        self.feature_dtype = getattr(model, "feature_dtype", torch.get_default_dtype())
        self.projection = mlp(widths).to(self.feature_dtype)
        self.head = nn.Linear(widths[-1], classes, dtype=self.feature_dtype)
        self.feature_shape = (widths[-1],)

    def features(self, x: Tensor) -> Tensor:
        features = self.model.features(x)
        return self.projection(features.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that several places of a model share."""
    places = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    return {name for name, value in model.named_parameters() if places[id(value)] > 1}


def with_projection(task: Task, widths: Sequence[int] | None) -> Task:
    """Return `task` with a projection head of `widths` on its model, by default that of its features and MOON's 256.

    The new weights are drawn from a seed that depends on the old ones, so that every host draws the same.
    UsageError if the model's outputs are not [batch, outputs].
    """
    module = task.model.module
    features = torch.zeros((2, *task.feature_shape), device=task.device)
    logits = task.head(task.initial_weights(), features, train=False)
    if logits.ndim != 2:
        found = f"the outputs are {list(logits.shape[1:])} for an example"
        raise UsageError(f"algorithm.widths: a projection head makes a vector, and {found}; widths=[] is without it")
    width = math.prod(task.feature_shape)
    if widths is None:
        widths = (width, 256)
    first = next(itertools.chain(module.parameters(), module.buffers()))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zlib.crc32(tensor_bytes(first).tobytes()))
        model = ModelWithProjection(module, [width, *widths], logits.shape[1], task.head_names)
    return task.with_model(model)


def train_classifier(
    network: Network, weights: Weights, x: Tensor, y: Tensor, *, optimizer: SGD, batch_size: int, epochs: int
) -> Weights:
    """Return `weights` after `epochs` passes of cross-entropy on (x, y) in shuffled batches.

    Momentum starts at zero. A network with batch norm skips a last batch of a single example.
    """
    weights = clone(weights)
    moments = optimizer.init(only(weights, network.parameters))
    for _ in range(epochs):
        for rows in server_batches(len(x), batch_size, x.device):
            if network.buffers and len(rows) == 1:
                continue  # batch norm cannot train on one example
            grads, buffers = classifier_gradients(network, weights, x[rows], y[rows])
            optimizer.update_(weights, grads, moments)
            weights |= buffers
    return weights


def classifier_gradients(network: Network, weights: Weights, x: Tensor, y: Tensor) -> tuple[Weights, Weights]:
    """Return the gradients of the cross-entropy on a batch, and the network's next buffers."""
    buffers = without(weights, network.parameters)

    def loss(trained: Weights) -> tuple[Tensor, Weights]:
        logits, new_buffers = network(trained | buffers, x)
        return F.cross_entropy(logits, y), new_buffers

    grads, _, new_buffers = gradients(loss, only(weights, network.parameters))
    return grads, new_buffers
