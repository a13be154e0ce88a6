"""FADA: Peng et al. 2020, "Federated Adversarial Domain Adaptation", Alg. 1, without its feature disentangler.

One client, the `target`, has no labels (its own are not used) and is scored; all others are sources. A table over all
clients is a sweep over `target`.

    source s:  w_s ← w_s − η ∇[CE(x, y) + a·CE(D_s(z), "target")],   z = G(x) the features, D_s frozen
    target:    w_t ← w_t − η ∇[a · mean over s of CE(D_s(z), "source")]
    server:    trains D_s by cross-entropy on the z of s and of the target, to tell the two apart
    target:    I_s = spread of its features under w_s, in as many k-means clusters as there are classes
    server:    θ ← Σ_s α_s w_s + (w_t − θ) without the head,   α = softmax over s of −I_s

A round has two exchanges, as the target needs the sources' models for I_s. The paper weighs sources by the gain in I,
before a source's training minus after it. All clients start from θ, so the first term is the same for all sources and
cancels in the softmax. I_s is per example. The paper does not say what becomes of the target's own steps, what a is, or
how D_s is trained; these are our choices.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State, Traits, represent
from rayfed.algorithms.common.client_weights import refuse_sampling
from rayfed.algorithms.common.networks import mlp, train_classifier
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, mean_of, only, stack, sub, tree_map, unstack

SOURCE, TARGET = 1, 0  # the two classes of a discriminator


@dataclass(frozen=True, kw_only=True)
class FADA(LocalTraining):
    """Clients keep their trained model until the second exchange. The target's model is scored, which is the
    server's."""

    name: ClassVar[str] = "fada"
    reference: ClassVar[str] = "Peng et al. 2020, Alg. 1; Li, He and Song 2023, appendix C"
    traits: ClassVar[Traits] = replace(
        LocalTraining.traits,
        needs_split=True,
        supports_loss_terms=False,
        trains_server=True,
        refuses_unseen_clients="has one target and its sources, and an unseen client is neither",
    )
    averaged: ClassVar[tuple[str, ...]] = ()

    target: int = option(0, low=0, help="index of the client without labels")
    weight_adversary: float = option(0.1, low=0, help="a, weight of the adversarial loss")
    hidden: list[int] = option([512, 512], low=1, high=65536, help="widths of the discriminators' hidden layers")
    server_epochs: int = option(1, low=1, help="the discriminators' epochs per round")
    server_lr: float = option(0.01, above=0, help="η_D, the discriminators' learning rate")
    server_momentum: float = option(0.9, low=0, below=1, help="the discriminators' momentum")
    server_batch_size: int = option(64, low=1, help="the discriminator's batch size")

    # Before a run

    def check(self, problem: ProblemSpec) -> None:
        refuse_sampling(problem, self.name, "weighs the models of all sources")
        clients = problem.task.num_clients
        if not 0 <= self.target < clients or clients < 2:
            raise UsageError(f"algorithm.target={self.target}: is not the index of one of two or more clients")

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        return (f"algorithm.target={self.target}: the model is for this client; ignore the scores of the others",)

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"discriminator": mlp([math.prod(task.feature_shape), *self.hidden, 2])}

    def sources(self, ctx: Context) -> list[int]:
        return [i for i in range(ctx.task.num_clients) if i != self.target]

    # First exchange: all clients train, and the server trains the discriminators

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return self, WeighSources(self)

    def init(self, ctx: Context) -> State:
        discriminators = [ctx.task.modules["discriminator"].draw_weights() for _ in self.sources(ctx)]
        return super().init(ctx) | {"discriminators": stack(discriminators)}

    def unicast(self, ctx: Context, server: State) -> State:
        rows = slice(None) if ctx.client == self.target else [self.sources(ctx).index(ctx.client)]
        return {"discriminators": tree_map(lambda leaf: leaf[rows], server["discriminators"])}

    def start(self, ctx: Context, client: State, down: State) -> State:
        is_target, count = ctx.client == self.target, len(self.sources(ctx))
        return super().start(ctx, client, down) | {
            # A source's discriminator is repeated, so that the work of all clients has the same shapes
            "discriminators": tree_map(lambda leaf: leaf.expand(count, *leaf.shape[1:]), down["discriminators"]),
            "label_weight": torch.tensor(float(not is_target), device=ctx.task.device),
            "opposite_domain": torch.tensor(SOURCE if is_target else TARGET, device=ctx.task.device),
        }

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        z, network = output.features.flatten(1), ctx.task.modules["discriminator"]
        opposite = work["opposite_domain"].expand(len(z))
        discriminators = [
            tree_map(lambda leaf, k=k: leaf[k], work["discriminators"]) for k in range(len(self.sources(ctx)))
        ]
        confusion = torch.stack([F.cross_entropy(network(d, z)[0], opposite) for d in discriminators]).mean()
        return work["label_weight"] * loss + self.weight_adversary * confusion, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        z = represent(ctx, work["weights"], data.train).flatten(1)
        return client | {"trained": work["weights"]}, up | {"representations": z}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        """Keep the sources' `models` [sources, ...] and the target's update of all but the head."""
        sent = {int(reply.client): tree_map(lambda leaf: leaf.to(ctx.task.device), reply.up) for reply in replies.each}
        body = only(server["weights"], set(ctx.task.trainable) - ctx.task.head_names)
        return server | {
            "models": stack([sent[source]["weights"] for source in self.sources(ctx)]),
            "target_update": sub(only(sent[self.target]["weights"], body), body),
            "discriminators": self.train_discriminators(
                ctx, server, {client: up["representations"] for client, up in sent.items()}
            ),
        }

    def train_discriminators(self, ctx: Context, server: State, z: dict[int, Tensor]) -> Weights:
        """Return the discriminators after training on the representations z [n, width] of sources and target."""
        sources, trained = self.sources(ctx), []
        for source, weights in zip(sources, unstack(server["discriminators"], len(sources)), strict=True):
            x = torch.cat([z[source], z[self.target]])
            y = torch.tensor([SOURCE] * len(z[source]) + [TARGET] * len(z[self.target]), device=x.device)
            trained.append(
                train_classifier(
                    ctx.task.modules["discriminator"],
                    weights,
                    x,
                    y,
                    optimizer=SGD(lr=ctx.scaled(self.server_lr), momentum=self.server_momentum),
                    batch_size=self.server_batch_size,
                    epochs=self.server_epochs,
                )
            )
        return stack(trained)


@dataclass(frozen=True)
class WeighSources(Exchange):
    """Second exchange of a round: the target computes I_s for the sources' models, and the server averages them."""

    method: FADA

    def unicast(self, ctx: Context, server: State) -> State:
        return {"models": server["models"]} if ctx.client == self.method.target else {}

    def start(self, ctx: Context, client: State, down: State) -> State:
        return {"weights": client["trained"]}  # to be scored as the trained model

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        if ctx.client != self.method.target:
            return client, {}
        spreads = []
        for k in range(len(self.method.sources(ctx))):
            model = tree_map(lambda leaf, k=k: leaf[k], down["models"]) | client["weights"]
            seed = int(torch.randint(2**31 - 1, ()))
            features = represent(ctx, model, data.train).flatten(1)
            spreads.append(cluster_spread(features, ctx.task.num_classes, seed))
        return client, {"spreads": torch.tensor(spreads, device=ctx.task.device)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        (spreads,) = [reply.up["spreads"] for reply in replies.each if "spreads" in reply.up]
        alpha = (-spreads.to(ctx.task.device)).softmax(0)
        weights = {name: mean_of(leaf, alpha) for name, leaf in server["models"].items()}
        weights |= {name: weights[name] + step for name, step in server["target_update"].items()}
        return only(server, ("discriminators",)) | {"weights": weights}


def cluster_spread(features: Tensor, clusters: int, seed: int) -> float:
    """Return Σ_r 1/(2 n_r) Σ_{i,j in cluster r} ‖f_i − f_j‖² per example of `features` [n, width], by k-means.

    The sum equals k-means' own objective, the squared distances to the clusters' means. It is computed by one thread:
    several would add up their parts in the order in which they finish, which changes the result by rounding.
    """
    points = features.cpu().numpy().astype(np.float64)
    means = KMeans(min(clusters, len(points)), n_init=1, random_state=seed)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters do no harm
        return float(means.fit(points).inertia_) / len(points)
