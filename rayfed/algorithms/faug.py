"""FAug: Jeong et al. 2018, "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
under Non-IID Private Data", section 3 (federated augmentation), with FedAvg in place of distillation, an autoencoder
in place of the GAN, and no web search.

    setup:   every client sends a few raw examples of each class, the seed examples
             the server trains a conditional generator G on them and sends G and their classes
             client i generates m examples with G, each of the class of which it then has fewest, and keeps them
    client:  SGD on its n_i examples and the m generated ones: each step takes a batch of the former and a few of the
             latter,  L = [n_i · CE(local) + m · CE(generated)] / (n_i + m)
    server:  FedAvg with weights n_i + m

This is a variant of the paper's method. Its server first adds similar images from a web search to the seed examples,
which is not possible here, and its G is that of a conditional GAN. Here G is the decoder of a conditional variational
autoencoder of MLPs (Sohn, Lee and Yan 2015), which is easier to train on few examples. With encoder e, decoder d and
noise ε ~ N(0, I), the autoencoder minimises the mean of ½‖x − d(z, y)‖² + KL(N(m, s²) ‖ N(0, I)) over the batch, where
(m, log s²) = e(x, y) and z = m + s ε.

Epochs are counted in the client's own examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State, Traits
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.common.soft_labels import check_real_inputs, one_hot
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import Network, gradients
from rayfed.core.optim import Adam
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, clone, only


@dataclass(frozen=True, kw_only=True)
class FAug(FedAvg):
    name: ClassVar[str] = "faug"
    reference: ClassVar[str] = "Jeong et al. 2018, section 3 (FAug), with a VAE for its GAN"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits,
        computes_with_inputs=True,
        requires_classes=True,
        trains_server=True,  # in the setup
    )

    seed_examples: int = option(5, low=1, help="examples of each class that a client sends")
    generated_examples: int = option(200, low=1, high=1_000_000, help="m, generated examples per client")
    generated_batch_size: int = option(10, low=1, high=65536, help="generated examples added to each local batch")
    noise: int = option(16, low=1, high=65536, help="width of the generator's noise")
    hidden: int = option(256, low=1, high=65536, help="width of the generator's and its encoder's hidden layers")
    server_lr: float = option(1e-3, above=0, help="the generator's learning rate (Adam)")
    server_steps: int = option(500, low=1, help="the generator's training steps, all in the setup")
    server_batch_size: int = option(64, low=1, high=65536, help="seed examples per training step")

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)

    def modules(self, task: Task) -> dict[str, nn.Module]:
        sizes = (self.noise, self.hidden, task.num_classes, task.inputs.shape)
        return {"encoder": Encoder(*sizes), "decoder": Decoder(*sizes)}

    def init(self, ctx: Context) -> State:
        none = torch.zeros(ctx.task.num_classes, dtype=torch.bool, device=ctx.task.device)
        return super().init(ctx) | {"generator": ctx.task.modules["decoder"].draw_weights(), "seed_classes": none}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return TrainGenerator(self), SendGenerator(self)

    def start(self, ctx: Context, client: State, down: State) -> State:
        share = torch.tensor(self.generated_examples / (ctx.examples + self.generated_examples), device=ctx.task.device)
        order = torch.randperm(self.generated_examples).to(ctx.task.device)
        return super().start(ctx, client, down) | {"generated": client["generated"], "order": order, "share": share}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        positions = torch.arange(self.generated_batch_size, device=batch.x.device)
        rows = work["order"][(positions + ctx.step * self.generated_batch_size) % self.generated_examples]
        count = len(batch.x)
        output = ctx.task.forward(weights, torch.cat([batch.x, work["generated"]["x"][rows]]))
        local, output = ctx.task.loss_of(weights, output, batch.y, output.logits[:count])
        generated = ctx.task.loss(output.logits[count:], work["generated"]["y"][rows], weights)
        return ctx.task.add_loss_terms((1 - work["share"]) * local + work["share"] * generated, weights, output)

    def weight(self, ctx: Context, examples: int) -> float:
        return super().weight(ctx, examples + self.generated_examples)


# Setup


@dataclass(frozen=True)
class TrainGenerator(Exchange):
    """Setup: every client sends examples of each class, and the server trains the generator on them."""

    method: FAug

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client, {"seed_examples": draw_seed_examples(data.train, self.method.seed_examples)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        method, device = self.method, ctx.task.device
        x, y = (torch.cat([r.up["seed_examples"][name] for r in replies.each]).to(device) for name in ("x", "y"))
        generator = train_decoder(
            ctx,
            server["generator"],
            x,
            y,
            noise=method.noise,
            lr=method.server_lr,
            steps=method.server_steps,
            batch_size=method.server_batch_size,
        )
        return server | {"generator": generator, "seed_classes": torch.bincount(y, minlength=ctx.task.num_classes) > 0}


@dataclass(frozen=True)
class SendGenerator(Exchange):
    """Setup: every client receives the generator, balances its classes with generated examples and keeps them."""

    method: FAug

    def broadcast(self, ctx: Context, server: State) -> State:
        return only(server, ("generator", "seed_classes"))

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        method = self.method
        counts = torch.bincount(data.train.y, minlength=ctx.task.num_classes)
        y = balance_classes(counts, method.generated_examples, down["seed_classes"])
        noise = torch.randn(method.generated_examples, method.noise).to(y.device)
        with torch.no_grad():
            x = ctx.task.modules["decoder"](down["generator"], noise, y)[0]
        return client | {"generated": {"x": x, "y": y}}, {}


def draw_seed_examples(part: Any, count: int) -> dict[str, Tensor]:
    """Return inputs `x` [n, ...] and classes `y` [n] of up to `count` random examples of every class of `part`."""
    rows_by_class = [torch.nonzero(part.y == c)[:, 0] for c in part.y.unique()]
    rows = torch.cat([rows[torch.randperm(len(rows))[:count].to(rows.device)] for rows in rows_by_class])
    return {"x": torch.cat([batch.x for batch in part.batches(512, rows)]), "y": part.y[rows]}


def balance_classes(counts: Tensor, total: int, allowed: Tensor) -> Tensor:
    """Return `total` classes that balance `counts` [classes]: each time the class with the fewest examples.

    Ties go to the lowest class. Only the classes that are `allowed` [classes] are returned.
    """
    by_class, classes = dict(zip(allowed.nonzero()[:, 0].tolist(), counts[allowed].tolist(), strict=True)), []
    for _ in range(total):
        classes.append(min(by_class, key=by_class.__getitem__))
        by_class[classes[-1]] += 1
    return torch.tensor(classes, device=counts.device)


# The conditional variational autoencoder


class Encoder(nn.Module):
    """e, which maps inputs [n, *shape] and classes [n] to (m, log s²), each [n, noise]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        super().__init__()
        self.classes, self.layers = classes, mlp([math.prod(shape) + classes, hidden, 2 * noise])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.layers(torch.cat([x.flatten(1), one_hot(y, self.classes)], 1)).chunk(2, 1)
        return mean, log_variance


class Decoder(nn.Module):
    """d, which maps noise [n, noise] and classes [n] to inputs [n, *shape]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        super().__init__()
        self.classes, self.shape = classes, tuple(shape)
        self.layers = mlp([noise + classes, hidden, math.prod(shape)])

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([z, one_hot(y, self.classes)], 1)).unflatten(1, self.shape)


def vae_loss(
    encoder: Network, decoder: Network, weights: dict[str, Weights], x: Tensor, y: Tensor, noise: Tensor
) -> Tensor:
    """Return L, a scalar, of a batch x [n, *shape] with classes y [n] and noise ε [n, noise]."""
    mean, log_variance = encoder(weights["encoder"], x, y)[0]
    decoded = decoder(weights["decoder"], mean + (log_variance / 2).exp() * noise, y)[0]
    error = (x - decoded).flatten(1).square().sum(1) / 2
    kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (error + kl).mean()


def train_decoder(
    ctx: Context, decoder: Weights, x: Tensor, y: Tensor, *, noise: int, lr: float, steps: int, batch_size: int
) -> Weights:
    """Return `decoder` after training it with a new encoder on (x, y), by Adam with learning rate `lr`.

    Batches are drawn with replacement, with torch's generator. `noise` is the width of z.
    """
    modules = ctx.task.modules
    parts = {"encoder": modules["encoder"].draw_weights(), "decoder": clone(decoder)}
    flat = {f"{part}/{name}": value for part, weights in parts.items() for name, value in weights.items()}
    adam = Adam(lr=lr)
    moments = adam.init(flat)
    for _ in range(steps):
        rows = torch.randint(len(x), (batch_size,)).to(x.device)
        epsilon = torch.randn(batch_size, noise).to(x.device)

        def loss(trained: Weights, rows: Tensor = rows, epsilon: Tensor = epsilon) -> tuple[Tensor, Weights]:
            by_part = {part: _weights_of(trained, part) for part in parts}
            return vae_loss(modules["encoder"], modules["decoder"], by_part, x[rows], y[rows], epsilon), {}

        grads, _, _ = gradients(loss, flat)
        adam.update_(flat, grads, moments)
    return _weights_of(flat, "decoder")


def _weights_of(flat: Weights, part: str) -> Weights:
    """Return the weights of one part, without the prefix of their names."""
    return {name.removeprefix(f"{part}/"): value for name, value in flat.items() if name.startswith(f"{part}/")}
