"""FAug: Jeong et al. 2018, "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
under Non-IID Private Data", section 3 (federated augmentation). FedAvg takes the place of distillation, an autoencoder
that of the GAN, and there is no web search.

    setup:   every client sends a few raw examples of each class, the seed examples
             the server trains a conditional generator G on them and sends G and their classes
             client i generates m examples with G, each of the class of which it then has fewest, and keeps them
    client:  SGD on its n_i examples and the m generated ones: each step takes a batch of the former and a few of the
             latter,  L = [n_i · CE(local) + m · CE(generated)] / (n_i + m)
    server:  FedAvg with weights n_i + m

This is a variant of the paper's method. The paper's server first adds similar images from a web search to the seed
examples, which is not possible here. Its G is that of a conditional GAN. Here G is the decoder of a conditional
variational autoencoder of MLPs (Sohn, Lee and Yan 2015), which is easier to train on few examples. With encoder e,
decoder d and noise ε ~ N(0, I), the latent vector is z = m + s ε, where (m, log s²) = e(x, y). The autoencoder
minimises the mean of ½‖x − d(z, y)‖² + KL(N(m, s²) ‖ N(0, I)) over the batch.

Epochs are counted in the client's own examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, Finished, ProblemSpec, Replies, State
from rayfed.algorithms.common.networks import ConditionalNetwork, mlp
from rayfed.algorithms.common.soft_labels import check_real_inputs
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import Network, gradients
from rayfed.core.optim import Adam
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, clone, only


@dataclass(frozen=True, kw_only=True)
class FAug(FedAvg):
    name = "faug"
    reference = "Jeong et al. 2018, section 3 (FAug), with a VAE for its GAN"
    traits = replace(
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
        server = super().init(ctx)
        server["generator"] = ctx.task.modules["decoder"].draw_weights()
        server["seed_classes"] = torch.zeros(ctx.task.num_classes, dtype=torch.bool, device=ctx.task.device)
        return server

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return TrainGenerator(self), SendGenerator(self)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        share = self.generated_examples / (ctx.examples + self.generated_examples)
        work["generated"] = client["generated"]
        device = ctx.task.device
        work["order"] = torch.randperm(self.generated_examples).to(device)
        work["share"] = torch.tensor(share, device=device)
        return work

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        positions = torch.arange(self.generated_batch_size, device=batch.x.device)
        positions = positions + ctx.step * self.generated_batch_size
        rows = work["order"][positions % self.generated_examples]
        generated = work["generated"]

        count = len(batch.x)
        together = torch.cat([batch.x, generated["x"][rows]])
        output = ctx.task.forward(weights, together)
        local_logits = output.logits[:count]
        generated_logits = output.logits[count:]
        local_loss, output = ctx.task.loss_of(weights, output, batch.y, local_logits)
        generated_loss = ctx.task.loss(generated_logits, generated["y"][rows], weights)
        share = work["share"]
        loss = (1 - share) * local_loss + share * generated_loss
        return ctx.task.add_loss_terms(loss, weights, output)

    def weight(self, ctx: Context, examples: int) -> float:
        return super().weight(ctx, examples + self.generated_examples)


# Setup


@dataclass(frozen=True)
class TrainGenerator(Exchange):
    """Setup: every client sends examples of each class, and the server trains the generator on them."""

    method: FAug

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        seeds = draw_seed_examples(data.train, self.method.seed_examples)
        return client, {"seed_examples": seeds}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        method = self.method
        seeds = [reply.up["seed_examples"] for reply in replies.each]
        x = torch.cat([seed["x"] for seed in seeds])
        y = torch.cat([seed["y"] for seed in seeds])
        device = ctx.task.device
        x = x.to(device)
        y = y.to(device)
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
        counts = torch.bincount(y, minlength=ctx.task.num_classes)
        return server | {"generator": generator, "seed_classes": counts > 0}


@dataclass(frozen=True)
class SendGenerator(Exchange):
    """Setup: every client receives the generator, balances its classes with generated examples and keeps them."""

    method: FAug

    def broadcast(self, ctx: Context, server: State) -> State:
        return only(server, ("generator", "seed_classes"))

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        method = self.method
        counts = torch.bincount(data.train.y, minlength=ctx.task.num_classes)
        y = balance_classes(counts, method.generated_examples, down["seed_classes"])
        noise = torch.randn(method.generated_examples, method.noise).to(y.device)
        decoder = ctx.task.modules["decoder"]
        with torch.no_grad():
            x, _ = decoder(down["generator"], noise, y)
        return client | {"generated": {"x": x, "y": y}}, {}


def draw_seed_examples(part: Any, count: int) -> dict[str, Tensor]:
    """Return inputs `x` [n, ...] and classes `y` [n] of up to `count` random examples of every class of `part`."""
    drawn = []
    for c in part.y.unique():
        rows = torch.nonzero(part.y == c)[:, 0]
        order = torch.randperm(len(rows))
        first = order[:count].to(rows.device)
        drawn.append(rows[first])
    rows = torch.cat(drawn)
    inputs = [batch.x for batch in part.batches(512, rows)]
    return {"x": torch.cat(inputs), "y": part.y[rows]}


def balance_classes(counts: Tensor, total: int, allowed: Tensor) -> Tensor:
    """Return `total` classes that balance `counts` [classes]: each time the class with the fewest examples.

    Ties go to the lowest class. Only the classes that are `allowed` [classes] are returned.
    """
    examples = counts.tolist()
    candidates = allowed.nonzero()[:, 0].tolist()
    classes = []
    for _ in range(total):
        rarest = min(candidates, key=examples.__getitem__)
        examples[rarest] += 1
        classes.append(rarest)
    return torch.tensor(classes, device=counts.device)


# The conditional variational autoencoder


class Encoder(ConditionalNetwork):
    """e, which maps inputs [n, *shape] and classes [n] to m and log s², joined: [n, 2 · noise]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        width = math.prod(shape)
        super().__init__(classes, mlp([width + classes, hidden, 2 * noise]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.flatten(1), y)


class Decoder(ConditionalNetwork):
    """d, which maps noise [n, noise] and classes [n] to inputs [n, *shape]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        width = math.prod(shape)
        layers = mlp([noise + classes, hidden, width])
        super().__init__(classes, layers.append(nn.Unflatten(1, tuple(shape))))


def vae_loss(
    encoder: Network, decoder: Network, weights: dict[str, Weights], x: Tensor, y: Tensor, noise: Tensor
) -> Tensor:
    """Return L, a scalar, of a batch x [n, *shape] with classes y [n] and noise ε [n, noise]."""
    encoded, _ = encoder(weights["encoder"], x, y)
    mean, log_variance = encoded.chunk(2, 1)
    z = mean + (log_variance / 2).exp() * noise
    decoded, _ = decoder(weights["decoder"], z, y)
    residual = (x - decoded).flatten(1)
    error = residual.square().sum(1) / 2
    divergence = mean.square() + log_variance.exp() - 1 - log_variance
    kl = divergence.sum(1) / 2
    return (error + kl).mean()


def train_decoder(
    ctx: Context, decoder: Weights, x: Tensor, y: Tensor, *, noise: int, lr: float, steps: int, batch_size: int
) -> Weights:
    """Return `decoder` after training it with a new encoder on (x, y), by Adam with learning rate `lr`.

    Batches are drawn with replacement, with torch's generator. `noise` is the width of z.
    """
    encoder_network = ctx.task.modules["encoder"]
    decoder_network = ctx.task.modules["decoder"]
    encoder = encoder_network.draw_weights()
    both = prefixed("encoder/", encoder) | prefixed("decoder/", clone(decoder))
    adam = Adam(lr=lr)
    moments = adam.init(both)
    for _ in range(steps):
        rows = torch.randint(len(x), (batch_size,)).to(x.device)
        epsilon = torch.randn(batch_size, noise).to(x.device)

        def loss(trained: Weights, rows: Tensor = rows, epsilon: Tensor = epsilon) -> tuple[Tensor, Weights]:
            weights = {"encoder": part_of(trained, "encoder/"), "decoder": part_of(trained, "decoder/")}
            return vae_loss(encoder_network, decoder_network, weights, x[rows], y[rows], epsilon), {}

        grads, _, _ = gradients(loss, both)
        adam.update_(both, grads, moments)
    return part_of(both, "decoder/")


def prefixed(prefix: str, weights: Weights) -> Weights:
    """Return `weights` with a prefix of their names."""
    return {prefix + name: value for name, value in weights.items()}


def part_of(both: Weights, prefix: str) -> Weights:
    """Return the weights with this prefix of their names, without it."""
    weights = {}
    for name, value in both.items():
        if name.startswith(prefix):
            weights[name.removeprefix(prefix)] = value
    return weights
