"""ADCOL: Li, He and Song 2023, "Adversarial Collaborative Learning on Non-IID Features", Eq. 2 and Alg. 1.

No model is averaged: each client (the paper's party) keeps its own model F_i = predictor ∘ G_i, batch norm included. A
shared discriminator D predicts which client computed a representation z = G_i(x).

    client:  F_i ← F_i − η ∇[CE(F_i(x), y) + μ KL(1/N ‖ D(z))],  KL = −log N − (1/N) Σ_j log D_j(z);  D is frozen
             sends z of its training examples: after local training, in evaluation mode, without augmentation
    server:  D ← D − η_D ∇CE(D(z), i) in shuffled minibatches of all representations sent

If only some clients take part in a round, D keeps its N outputs and the target stays 1/N.

With `fixed_size` (appendix B.14), D has one output per client of the cohort, and a round has two exchanges. The cohort
trains without D and sends z, and the server trains a new D to predict the positions of the clients in the cohort; then
the same clients train again, with the target one over the cohort's size. In table 18, five of fifty parties drop out at
random before five others are drawn; `cohort=5` gives the same rounds.

D's momentum starts at zero in every round. D needs enough steps: on Digits it takes 582 per round (37,190
representations in batches of 64), and smaller data need more passes (`server_epochs`) for as many. While
`discriminator_loss` stays at log N, training is the same for every μ as for μ = 0.

With `discriminators` = k, the divergence is the mean over the discriminators received in the last k rounds, which were
trained in rounds max(1, t − k) to t − 1 (Eq. 18); the first, which is untrained, counts in round 1 only. Clients keep
the earlier ones, so that only the newest is sent.

The target for sampled clients, initial discriminators and the server's optimiser are our choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Delegate, Exchange, ProblemSpec, Replies, State, Traits, represent
from rayfed.algorithms.common.networks import mlp, train_classifier
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import Network, gradients, weights_of
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only, stack, tree_map, without, zeros_like


@dataclass(frozen=True, kw_only=True)
class Adcol(FedAvg):
    name: ClassVar[str] = "adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, Alg. 1"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits,
        needs_split=True,
        supports_loss_terms=False,
        default_eval_point="downloaded",  # the client's own model
        logged_scalars=("discriminator_loss", "discriminator_accuracy"),
        trains_server=True,
    )

    mu: float = option(1.0, low=0, help="μ, weight of the divergence; 0: local training alone")
    sampling: float = option(1.0, above=0, high=1, help="share of representations that a client sends")
    cache: bool = option(False, help="also train on absent clients' last representations")
    fixed_size: bool = option(False, help="a new discriminator each round, with an output per sampled client")
    share_predictor: bool = option(False, help="average the head as FedAvg does")
    discriminators: int = option(1, low=1, high=1000, help="N_d, latest discriminators in the divergence's mean")
    network: str = option("mlp", choices=("mlp", "resnet18", "resnet50"), help="architecture of the discriminator")
    hidden: list[int] = option([512, 512], low=1, high=65536, help="widths of the discriminator's hidden layers")
    linear: bool = option(False, help="no ReLU in the discriminator (appendix B.15)")
    server_epochs: int | None = option(
        None, low=1, help="the discriminator's epochs per round; null: 1, or 10 with fixed_size"
    )
    server_lr: float = option(0.01, above=0, help="η_D, the discriminator's learning rate")
    server_momentum: float = option(0.9, low=0, below=1, help="the discriminator's momentum")
    server_weight_decay: float = option(1e-5, low=0, help="the discriminator's weight decay")
    server_batch_size: int = option(64, low=1, help="the discriminator's batch size")

    # Before a run

    def check(self, problem: ProblemSpec) -> None:
        if self.fixed_size and (self.cache or self.discriminators > 1):
            raise UsageError(
                "algorithm.fixed_size=true: an output stands for a different client in each round, so that earlier "
                "representations and discriminators are of no use; use cache=false and discriminators=1"
            )
        if self.share_predictor and not problem.task.head_names:
            raise UsageError("algorithm.share_predictor=true: the model has no head that could be averaged")

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        uploads = self.upload_sizes(problem)
        vectors = sum(uploads) * problem.cohort / len(uploads)
        steps = self.epochs_per_round * math.ceil(vectors / self.server_batch_size)
        outputs = problem.cohort if self.fixed_size else problem.task.num_clients
        return (
            f"the discriminator takes about {steps} steps per round (582 on the paper's Digits); while its loss stays "
            f"at log {outputs} = {math.log(outputs):.2f}, it has learned nothing and mu has no effect; to train it "
            "longer, raise algorithm.server_epochs",
        )

    def upload_size(self, examples: int) -> int:
        """Return how many representations a client with `examples` training examples sends."""
        return math.ceil(self.sampling * examples - 1e-9)  # 0.28·25 is a little more than 7 in floating point

    def upload_sizes(self, problem: ProblemSpec) -> list[int]:
        """Return how many representations each client sends when it takes part in a round."""
        return [self.upload_size(n) for n in list(problem.examples.values())[: problem.task.num_clients]]

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """4 · n · d · r + N · S_D: a share r of n representations of d numbers up, and N times the discriminator down.

        Variants that send more or in other exchanges (`fixed_size`, `share_predictor`) have no formula.
        """
        if self.fixed_size or self.share_predictor:
            return None
        representations = 4.0 * sum(examples) * math.prod(ctx.task.feature_shape) * self.sampling
        discriminator = sum(p.numel() for p in ctx.task.modules["discriminator"].module.parameters())
        return representations + len(examples) * 4 * discriminator

    # What stays with a client, and the discriminator

    def personal(self, task: Task) -> frozenset[str]:
        names = frozenset(task.initial_weights())
        return names - (task.head_names - task.personal_names) if self.share_predictor else names

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"discriminator": self.build_discriminator(task, task.num_clients)}

    def build_discriminator(self, task: Task, outputs: int) -> nn.Module:
        width = math.prod(task.feature_shape)
        if self.network != "mlp":
            return ResNetDiscriminator(self.network, width, outputs)
        return mlp([width, *self.hidden, outputs], linear=self.linear)

    def initial_discriminator(self, task: Task, outputs: int) -> Weights:
        """Return newly drawn weights.

        `task.modules["discriminator"]` runs with them for any number of outputs, since linear layers take their sizes
        from the weights.
        """
        return weights_of(self.build_discriminator(task, outputs).to(task.device))

    @property
    def epochs_per_round(self) -> int:
        return self.server_epochs or (10 if self.fixed_size else 1)

    # A round

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return (TrainWithoutDiscriminator(self), TrainWithDiscriminator(self)) if self.fixed_size else (self,)

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["discriminator"] = {} if self.fixed_size else self.initial_discriminator(ctx.task, ctx.task.num_clients)
        return server | ({"cache": {}} if self.cache else {})

    def join(self, ctx: Context) -> State:
        client, earlier = super().join(ctx), self.discriminators - 1
        if not earlier:
            return client
        untrained = zeros_like(weights_of(ctx.task.modules["discriminator"].module))
        received_in = torch.zeros(earlier, device=ctx.task.device)  # the round of each, newest first; 0: none yet
        return client | {"earlier_discriminators": stack([untrained] * earlier), "received_in": received_in}

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(ctx, server) | {"discriminator": server["discriminator"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if "received_in" not in client:
            return work
        # the discriminator of round 1 was never trained, so it counts in that round only
        in_use = (client["received_in"] > max(ctx.round - self.discriminators, 1)).float()
        return work | {"earlier_discriminators": client["earlier_discriminators"], "in_use": in_use}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, dict[str, Tensor]]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            metrics = {"cross_entropy": loss, "representation_variance": z.var(0, unbiased=False).mean()}
            if "discriminator" in down:
                kl = self.divergence(ctx, work, down["discriminator"], self.discriminator_input(z))
                loss, metrics = loss + self.mu * kl, metrics | {"divergence": kl}
            return loss, (output.buffers, metrics)

        grads, loss, (buffers, metrics) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, metrics | {"loss": loss}

    def divergence(self, ctx: Context, work: State, newest: Weights, z: Tensor) -> Tensor:
        """Return the mean divergence at `z` [batch, width]. Discriminators are frozen and run in evaluation mode."""

        def single(weights: Weights) -> Tensor:
            return divergence(ctx.task.modules["discriminator"](weights, z, train=False)[0])

        total = single(newest)
        if "in_use" not in work:
            return total
        in_use = work["in_use"]
        earlier = [
            in_use[k] * single(tree_map(lambda leaf, k=k: leaf[k], work["earlier_discriminators"]))
            for k in range(len(in_use))
        ]
        return (total + torch.stack(earlier).sum()) / (1 + in_use.sum())

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = self.finish_training(ctx, work, client, down, data)
        client, rows = self.select_records(ctx, client, len(data.train))
        z = represent(ctx, work["weights"], data.train, rows).flatten(1)
        return client, up | {"representations": self.protect_upload(self.discriminator_input(z))}

    def finish_training(
        self, ctx: Context, work: State, client: State, down: State, data: ClientData
    ) -> tuple[State, State]:
        """Return (the client's next state, `up`) without representations."""
        client, up = super().finish(ctx, work, client, down, data)
        if "received_in" in client:
            rounds, newest = client["received_in"], torch.tensor([float(ctx.round)], device=ctx.task.device)
            earlier = tree_map(
                lambda new, old: torch.cat([new[None], old[:-1]]),
                down["discriminator"],
                client["earlier_discriminators"],
            )
            client |= {"earlier_discriminators": earlier, "received_in": torch.cat([newest, rounds[:-1]])}
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = self.average_predictor(ctx, server, replies)
        by_client = {int(r.client): r.up["representations"].to(ctx.task.device) for r in replies.each}
        if self.cache:
            cached = {int(client): z for client, z in server["cache"].items()}
            by_client = dict(sorted((cached | by_client).items()))
            server = server | {"cache": {str(client): z for client, z in by_client.items()}}
        outputs = [ctx.cohort.index(client) if self.fixed_size else client for client in by_client]
        counts = torch.tensor([len(z) for z in by_client.values()])
        representations = torch.cat(list(by_client.values()))
        labels = torch.tensor(outputs).repeat_interleave(counts).to(representations.device)

        weights = self.initial_discriminator(ctx.task, len(ctx.cohort)) if self.fixed_size else server["discriminator"]
        server = server | self.train_discriminator(ctx, server, weights, representations, labels)
        network = ctx.task.modules["discriminator"]
        scores = evaluate_discriminator(network, server["discriminator"], representations, labels)
        return server | dict(zip(self.traits.logged_scalars, scores, strict=True))

    def average_predictor(self, ctx: Context, server: State, replies: Replies) -> State:
        """Average the head with `share_predictor`."""
        return super().aggregate(ctx, server, replies) if self.share_predictor else server

    def server_optimizer(self, ctx: Context) -> SGD:
        """Return the discriminator's optimiser."""
        return SGD(lr=ctx.scaled(self.server_lr), momentum=self.server_momentum, weight_decay=self.server_weight_decay)

    # What private variants override

    def discriminator_input(self, z: Tensor) -> Tensor:
        """Return representations [batch, width] as the discriminator sees them, on the server and in the divergence."""
        return z

    def select_records(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        """Return (the client's next state, the rows whose representations it sends; None: all of them)."""
        return client, None if self.sampling == 1 else torch.randperm(examples)[: self.upload_size(examples)]

    def protect_upload(self, z: Tensor) -> Tensor:
        """Return representations [n, width] as they are sent."""
        return z

    def train_discriminator(self, ctx: Context, server: State, weights: Weights, z: Tensor, labels: Tensor) -> State:
        """Return the changes of the server's state after training the discriminator `weights` on (z, labels)."""
        trained = train_classifier(
            ctx.task.modules["discriminator"],
            weights,
            z,
            labels,
            optimizer=self.server_optimizer(ctx),
            batch_size=self.server_batch_size,
            epochs=self.epochs_per_round,
        )
        return {"discriminator": trained}


@dataclass(frozen=True)
class TrainWithoutDiscriminator(Delegate):
    """First exchange with `fixed_size`: the cohort trains without a discriminator and sends representations."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return without(self.base.broadcast(ctx, server), ("discriminator",))


@dataclass(frozen=True)
class TrainWithDiscriminator(Delegate):
    """Second exchange with `fixed_size`: the cohort trains with the new discriminator and sends no representations."""

    base: Adcol

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return self.base.finish_training(ctx, work, client, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return self.base.average_predictor(ctx, server, replies)


def divergence(logits: Tensor) -> Tensor:
    """Return KL(uniform ‖ softmax(logits)), the mean over the batch; its gradient per row is softmax − 1/N."""
    return -math.log(logits.shape[1]) - F.log_softmax(logits, 1).mean()


class ResNetDiscriminator(nn.Module):
    """A torchvision ResNet on vectors [batch, width], each reshaped to two channels of a square, padded with zeros."""

    def __init__(self, kind: str, width: int, outputs: int):
        super().__init__()
        self.side = math.ceil(math.sqrt(width / 2))
        self.padding = 2 * self.side**2 - width
        from torchvision import models

        self.net = getattr(models, kind)(num_classes=outputs)
        self.net.conv1 = nn.Conv2d(2, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.net(F.pad(z, (0, self.padding)).unflatten(1, (2, self.side, self.side)))


@torch.no_grad()
def evaluate_discriminator(network: Network, weights: Weights, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy, accuracy in [0, 1]) on (z, labels), in evaluation mode."""
    logits = torch.cat([network(weights, chunk, train=False)[0] for chunk in z.split(512)])
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
