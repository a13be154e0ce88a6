"""ADCOL: Li, He and Song 2023, "Adversarial Collaborative Learning on Non-IID Features", Eq. 2 and Alg. 1.

No model is averaged: each client (the paper's party) keeps its own model F_i = predictor ∘ G_i, batch norm included. A
shared discriminator D predicts which client computed a representation z = G_i(x).

    client:  F_i ← F_i − η ∇[CE(F_i(x), y) + μ KL(1/N ‖ D(z))],  KL = −log N − (1/N) Σ_j log D_j(z);  D is frozen
             sends z of its training examples: after local training, in evaluation mode, without augmentation
    server:  D ← D − η_D ∇CE(D(z), i) in shuffled minibatches of all representations sent

If only some clients take part in a round, D keeps its N outputs and the target stays 1/N.

With `fixed_size` (appendix B.14), D has one output per client of the cohort, and a round has two exchanges. The cohort
trains without D and sends z. The server trains a new D to predict the positions of the clients in the cohort. Then the
same clients train again, with the target one over the cohort's size. In table 18, five of fifty parties drop out at
random before five others are drawn; `cohort=5` gives the same rounds.

D's momentum starts at zero in every round. D needs enough steps: on Digits it takes 582 per round (37,190
representations in batches of 64), and smaller data need more passes (`server_epochs`) for as many. While
`discriminator_loss` stays at log N, training is the same for every μ as for μ = 0.

With `discriminators` = k, the divergence is the mean over the discriminators received in the last k rounds. They were
trained in rounds max(1, t − k) to t − 1 (Eq. 18). The first one is untrained and counts in round 1 only. Clients keep
the earlier ones, so that only the newest is sent.

The target for sampled clients, initial discriminators and the server's optimiser are our choices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import (
    ClientData,
    Context,
    Delegate,
    Exchange,
    Finished,
    Metrics,
    ProblemSpec,
    Replies,
    State,
    Stepped,
    represent,
)
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
    name = "adcol"
    reference = "Li, He and Song 2023, Alg. 1"
    traits = replace(
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
        batches = math.ceil(vectors / self.server_batch_size)
        steps = self.epochs_per_round * batches
        outputs = problem.task.num_clients
        if self.fixed_size:
            outputs = problem.cohort
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
        examples = list(problem.examples.values())
        participants = examples[: problem.task.num_clients]
        return [self.upload_size(count) for count in participants]

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """4 · n · d · r + N · S_D: a share r of n vectors of d numbers goes up, and D goes down to N clients.

        Variants that send more or in other exchanges (`fixed_size`, `share_predictor`) have no formula.
        """
        if self.fixed_size or self.share_predictor:
            return None
        n = sum(examples)
        d = math.prod(ctx.task.feature_shape)
        discriminator = ctx.task.modules["discriminator"].module
        parameters = sum(parameter.numel() for parameter in discriminator.parameters())
        sent = 4.0 * n * d * self.sampling
        received = len(examples) * 4 * parameters
        return sent + received

    # What stays with a client, and the discriminator

    def personal(self, task: Task) -> frozenset[str]:
        names = frozenset(task.initial_weights())
        if self.share_predictor:
            shared = task.head_names - task.personal_names
            names -= shared
        return names

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
        """The discriminator's epochs."""
        if self.server_epochs is not None:
            return self.server_epochs
        return 10 if self.fixed_size else 1

    # A round

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        if self.fixed_size:
            return TrainWithoutDiscriminator(self), TrainWithDiscriminator(self)
        return (self,)

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["discriminator"] = {}
        if not self.fixed_size:
            server["discriminator"] = self.initial_discriminator(ctx.task, ctx.task.num_clients)
        if self.cache:
            server["cache"] = {}
        return server

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        earlier = self.discriminators - 1
        if earlier > 0:
            untrained = zeros_like(weights_of(ctx.task.modules["discriminator"].module))
            client["earlier_discriminators"] = stack([untrained] * earlier)
            # the round in which each was received, the newest first; 0: none yet
            client["received_in"] = torch.zeros(earlier, device=ctx.task.device)
        return client

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(ctx, server) | {"discriminator": server["discriminator"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if "received_in" in client:
            # the discriminator of round 1 was never trained, so it counts in that round only
            oldest = max(ctx.round - self.discriminators, 1)
            work["in_use"] = (client["received_in"] > oldest).float()
            work["earlier_discriminators"] = client["earlier_discriminators"]
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Metrics]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            metrics = {"cross_entropy": loss, "representation_variance": z.var(0, unbiased=False).mean()}
            if "discriminator" in down:
                inputs = self.discriminator_input(z)
                kl = self.divergence(ctx, work, down["discriminator"], inputs)
                metrics["divergence"] = kl
                loss = loss + self.mu * kl
            return loss, (output.buffers, metrics)

        trained = only(weights, self.trained(ctx))
        grads, loss, (buffers, metrics) = gradients(objective, trained)
        grads = self.correct(ctx, grads, work, down)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        return work | {"weights": weights | buffers}, metrics | {"loss": loss}

    def divergence(self, ctx: Context, work: State, newest: Weights, z: Tensor) -> Tensor:
        """Return the mean divergence at `z` [batch, width]. Discriminators are frozen and run in evaluation mode."""
        discriminator = ctx.task.modules["discriminator"]
        logits, _ = discriminator(newest, z, train=False)
        total = divergence(logits)
        if "in_use" not in work:
            return total
        in_use = work["in_use"]
        terms = []
        for k in range(len(in_use)):
            earlier = tree_map(itemgetter(k), work["earlier_discriminators"])
            logits, _ = discriminator(earlier, z, train=False)
            terms.append(in_use[k] * divergence(logits))
        total = total + torch.stack(terms).sum()
        return total / (1 + in_use.sum())

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = self.finish_training(ctx, work, client, down, data)
        client, rows = self.select_records(ctx, client, len(data.train))
        z = represent(ctx, work["weights"], data.train, rows)
        inputs = self.discriminator_input(z.flatten(1))
        up["representations"] = self.protect_upload(inputs)
        return client, up

    def finish_training(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        """Return (the client's next state, `up`) without representations."""
        client, up = super().finish(ctx, work, client, down, data)
        if "received_in" in client:
            this_round = torch.tensor(float(ctx.round), device=ctx.task.device)
            client["received_in"] = pushed(this_round, client["received_in"])
            earlier = client["earlier_discriminators"]
            client["earlier_discriminators"] = tree_map(pushed, down["discriminator"], earlier)
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = self.average_predictor(ctx, server, replies)
        of_clients: dict[int, Tensor] = {}
        for reply in replies.each:
            of_clients[reply.client] = reply.up["representations"].to(ctx.task.device)
        if self.cache:
            of_clients = with_absent(server["cache"], of_clients)
            server = server | {"cache": {str(client): z for client, z in of_clients.items()}}
        z, labels = self.labelled(ctx, of_clients)

        if self.fixed_size:
            weights = self.initial_discriminator(ctx.task, len(ctx.cohort))
        else:
            weights = server["discriminator"]
        server = server | self.train_discriminator(ctx, server, weights, z, labels)
        network = ctx.task.modules["discriminator"]
        loss, accuracy = evaluate_discriminator(network, server["discriminator"], z, labels)
        return server | {"discriminator_loss": loss, "discriminator_accuracy": accuracy}

    def labelled(self, ctx: Context, of_clients: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return all representations [n, width] and the discriminator's output [n] that stands for their client."""
        outputs = list(of_clients)
        if self.fixed_size:
            outputs = [ctx.cohort.index(client) for client in of_clients]
        counts = torch.tensor([len(z) for z in of_clients.values()])
        representations = torch.cat(list(of_clients.values()))
        labels = torch.tensor(outputs).repeat_interleave(counts)
        return representations, labels.to(representations.device)

    def average_predictor(self, ctx: Context, server: State, replies: Replies) -> State:
        """Average the head with `share_predictor`."""
        if self.share_predictor:
            return super().aggregate(ctx, server, replies)
        return server

    def server_optimizer(self, ctx: Context) -> SGD:
        """Return the discriminator's optimiser."""
        return SGD(lr=ctx.scaled(self.server_lr), momentum=self.server_momentum, weight_decay=self.server_weight_decay)

    # What private variants override

    def discriminator_input(self, z: Tensor) -> Tensor:
        """Return representations [batch, width] as the discriminator sees them, on the server and in the divergence."""
        return z

    def select_records(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        """Return (the client's next state, the rows whose representations it sends; None: all of them)."""
        if self.sampling == 1:
            return client, None
        rows = torch.randperm(examples)
        return client, rows[: self.upload_size(examples)]

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

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        return self.base.finish_training(ctx, work, client, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return self.base.average_predictor(ctx, server, replies)


def pushed(newest: Tensor, earlier: Tensor) -> Tensor:
    """Return `earlier` [n, ...] with `newest` [...] put in front and the last one left out."""
    return torch.cat([newest[None], earlier[:-1]])


def with_absent(cache: State, present: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the representations of the clients that are present, and the cached ones of the others, by client."""
    cached = {int(client): z for client, z in cache.items()}
    together = cached | dict(present)
    return dict(sorted(together.items()))


def divergence(logits: Tensor) -> Tensor:
    """Return KL(uniform ‖ softmax(logits)), the mean over the batch; its gradient per row is softmax − 1/N."""
    outputs = logits.shape[1]
    log_p = F.log_softmax(logits, 1)
    return -math.log(outputs) - log_p.mean()


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
        padded = F.pad(z, (0, self.padding))
        images = padded.unflatten(1, (2, self.side, self.side))
        return self.net(images)


@torch.no_grad()
def evaluate_discriminator(network: Network, weights: Weights, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy, accuracy in [0, 1]) on (z, labels), in evaluation mode."""
    chunks = []
    for chunk in z.split(512):
        logits, _ = network(weights, chunk, train=False)
        chunks.append(logits)
    logits = torch.cat(chunks)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels), accuracy
