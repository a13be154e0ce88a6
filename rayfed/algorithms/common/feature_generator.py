"""FedGen's generator: a network from classes and noise to features, and its training on the server."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Context, State
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import gradients
from rayfed.core.optim import Adam
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import Weights, clone, only, without


class FeatureGenerator(nn.Module):
    """G(y, ε): classes [batch] and noise [batch, noise] to features [batch, *shape]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        super().__init__()
        self.classes, self.shape = classes, tuple(shape)
        width = int(torch.Size(self.shape).numel())
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, y: Tensor, noise: Tensor) -> Tensor:
        return self.layers(torch.cat([noise, one_hot(y, self.classes)], 1)).unflatten(1, self.shape)


def drawn_classes(counts: Tensor, size: int) -> Tensor:
    """`size` classes drawn in proportion to `counts` [classes]."""
    edges = (counts.cumsum(0) / counts.sum())[:-1]
    return (torch.rand(size, device=counts.device)[:, None] >= edges).sum(1)


@dataclass(frozen=True, kw_only=True)
class GeneratorServer(FedAvg):
    noise: int = option(512, low=1, high=65536, help="d, width of the generator's noise")
    hidden: int = option(512, low=1, high=65536, help="width of the generator's hidden layer")
    server_lr: float = option(0.005, above=0, help="lr_G, learning rate of the generator's Adam")
    server_steps: int = option(1000, low=1, help="steps of the generator in a round, on batches of local.batch_size")

    def head(self, task: Task) -> frozenset[str]:
        """Names of the head's weights that travel."""
        return task.head_names - self.personal(task)

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if not task.feature_shape:
            return {}  # refused in `check`
        return {"generator": FeatureGenerator(self.noise, self.hidden, task.num_classes, task.feature_shape)}

    def generated(self, ctx: Context, generator: Weights, counts: Tensor) -> tuple[Tensor, Tensor]:
        """(ŷ, features)."""
        y = drawn_classes(counts, ctx.batch_size)
        noise = torch.rand(len(y), self.noise, device=y.device)
        return y, ctx.task.modules["generator"](generator, y, noise)[0]

    def as_sent(self, task: Task) -> Weights:
        """Initial values of what the head does not send."""
        return only(task.initial_weights(), task.head_names & self.personal(task))

    def train_generator(
        self, ctx: Context, server: State, heads: Weights, shares: Tensor
    ) -> tuple[Weights, State, Tensor]:
        """(the generator, its moments) after a round's steps on the `heads` [clients, …] that were sent; mean loss."""
        generator, moments = clone(server["generator"]), clone(server["moments"])
        adam, rest = Adam(lr=self.server_lr), self.as_sent(ctx.task)
        body = without(ctx.task.initial_weights(), ctx.task.head_names)  # the template wants all names

        def logits(head: Weights, features: Tensor) -> Tensor:
            return ctx.task.head(body | rest | head, features, train=False)

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            y, features = self.generated(ctx, trained, server["counts"])
            each = torch.vmap(logits, in_dims=(0, None))(heads, features)
            return F.cross_entropy(torch.tensordot(shares, each, 1), y), {}

        total = torch.zeros((), device=ctx.task.device)
        for _ in range(self.server_steps):
            grads, loss, _ = gradients(objective, generator)
            adam.update_(generator, grads, moments)
            total += loss
        return generator, moments, total / self.server_steps
