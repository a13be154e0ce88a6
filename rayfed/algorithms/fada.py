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
from operator import itemgetter

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, Finished, ProblemSpec, Replies, State, represent
from rayfed.algorithms.common.client_weights import refuse_sampling
from rayfed.algorithms.common.networks import mlp, train_classifier
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, mean_of, only, stack, sub, tree_map, unstack, without

SOURCE, TARGET = 1, 0  # the two classes of a discriminator


@dataclass(frozen=True, kw_only=True)
class FADA(LocalTraining):
    """Clients keep their trained model until the second exchange. The target's model is scored, which is the
    server's."""

    name = "fada"
    reference = "Peng et al. 2020, Alg. 1; Li, He and Song 2023, appendix C"
    traits = replace(
        LocalTraining.traits,
        needs_split=True,
        supports_loss_terms=False,
        trains_server=True,
        refuses_unseen_clients="has one target and its sources, and an unseen client is neither",
    )
    averaged = ()

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
        width = math.prod(task.feature_shape)
        return {"discriminator": mlp([width, *self.hidden, 2])}

    def sources(self, ctx: Context) -> list[int]:
        """Return the indices of all clients but the target."""
        clients = list(range(ctx.task.num_clients))
        clients.remove(self.target)
        return clients

    # First exchange: all clients train, and the server trains the discriminators

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return self, WeighSources(self)

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        discriminator = ctx.task.modules["discriminator"]
        drawn = [discriminator.draw_weights() for _ in self.sources(ctx)]
        server["discriminators"] = stack(drawn)
        return server

    def unicast(self, ctx: Context, server: State) -> State:
        discriminators = server["discriminators"]
        if ctx.client != self.target:
            row = self.sources(ctx).index(ctx.client)
            discriminators = tree_map(itemgetter([row]), discriminators)
        return {"discriminators": discriminators}

    def start(self, ctx: Context, client: State, down: State) -> State:
        sources = len(self.sources(ctx))

        def expanded(leaf: Tensor) -> Tensor:
            return leaf.expand(sources, *leaf.shape[1:])

        is_target = ctx.client == self.target
        opposite = SOURCE if is_target else TARGET
        work = super().start(ctx, client, down)
        # A source's discriminator is repeated, so that the work of all clients has the same shapes
        work["discriminators"] = tree_map(expanded, down["discriminators"])
        work["label_weight"] = torch.tensor(float(not is_target), device=ctx.task.device)
        work["opposite_domain"] = torch.tensor(opposite, device=ctx.task.device)
        return work

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        z = output.features.flatten(1)
        network = ctx.task.modules["discriminator"]
        opposite = work["opposite_domain"].expand(len(z))
        confusions = []
        for k in range(len(self.sources(ctx))):
            discriminator = tree_map(itemgetter(k), work["discriminators"])
            logits, _ = network(discriminator, z)
            confusions.append(F.cross_entropy(logits, opposite))
        confusion = torch.stack(confusions).mean()
        return work["label_weight"] * loss + self.weight_adversary * confusion, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = super().finish(ctx, work, client, down, data)
        z = represent(ctx, work["weights"], data.train)
        client["trained"] = work["weights"]
        up["representations"] = z.flatten(1)
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        """Keep the sources' `models` [sources, ...] and the target's update of all but the head."""
        models: dict[int, Weights] = {}
        z: dict[int, Tensor] = {}
        for reply in replies.each:
            sent = tree_map(lambda leaf: leaf.to(ctx.task.device), reply.up)
            models[reply.client] = sent["weights"]
            z[reply.client] = sent["representations"]
        of_sources = [models[source] for source in self.sources(ctx)]
        trained = only(server["weights"], ctx.task.trainable)
        body = without(trained, ctx.task.head_names)
        of_target = only(models[self.target], body)
        discriminators = self.train_discriminators(ctx, server, z)
        return server | {
            "models": stack(of_sources),
            "target_update": sub(of_target, body),
            "discriminators": discriminators,
        }

    def train_discriminators(self, ctx: Context, server: State, z: dict[int, Tensor]) -> Weights:
        """Return the discriminators after training on the representations z [n, width] of sources and target."""
        sources = self.sources(ctx)
        before = unstack(server["discriminators"], len(sources))
        of_target = z[self.target]
        trained = []
        for source, discriminator in zip(sources, before, strict=True):
            of_source = z[source]
            domains = [SOURCE] * len(of_source) + [TARGET] * len(of_target)
            y = torch.tensor(domains, device=of_source.device)
            weights = train_classifier(
                ctx.task.modules["discriminator"],
                discriminator,
                torch.cat([of_source, of_target]),
                y,
                optimizer=SGD(lr=ctx.scaled(self.server_lr), momentum=self.server_momentum),
                batch_size=self.server_batch_size,
                epochs=self.server_epochs,
            )
            trained.append(weights)
        return stack(trained)


@dataclass(frozen=True)
class WeighSources(Exchange):
    """Second exchange of a round: the target computes I_s for the sources' models, and the server averages them."""

    method: FADA

    def unicast(self, ctx: Context, server: State) -> State:
        if ctx.client == self.method.target:
            return {"models": server["models"]}
        return {}

    def start(self, ctx: Context, client: State, down: State) -> State:
        return {"weights": client["trained"]}  # to be scored as the trained model

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        if ctx.client != self.method.target:
            return client, {}
        spreads = []
        for k in range(len(self.method.sources(ctx))):
            sent = tree_map(itemgetter(k), down["models"])
            model = sent | client["weights"]
            seed = int(torch.randint(2**31 - 1, ()))
            features = represent(ctx, model, data.train)
            spread = cluster_spread(features.flatten(1), ctx.task.num_classes, seed)
            spreads.append(spread)
        return client, {"spreads": torch.tensor(spreads, device=ctx.task.device)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        (spreads,) = [reply.up["spreads"] for reply in replies.each if "spreads" in reply.up]
        spreads = spreads.to(ctx.task.device)
        alpha = (-spreads).softmax(0)
        weights = {name: mean_of(models, alpha) for name, models in server["models"].items()}
        for name, update in server["target_update"].items():
            weights[name] = weights[name] + update
        return {"discriminators": server["discriminators"], "weights": weights}


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
