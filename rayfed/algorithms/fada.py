"""FADA: Peng et al. 2020, "Federated Adversarial Domain Adaptation", Alg. 1, without its feature disentangler.

One client, the `target`, has no labels (those in its data are not used); the others are sources. A table over all
clients is a sweep over `target`, and the score of a run is that of the client `target`.

    source s:  w_s ← w_s − η ∇[CE(x, y) + a·CE(D_s(z), "target")],   z = G(x) the features, D_s frozen
    target:    w_t ← w_t − η ∇[a · mean over s of CE(D_s(z), "source")]
    server:    D_s by cross-entropy on the z that s and the target send: which of the two each is of
    target:    I_s = spread of its features in as many k-means clusters as there are classes, by the model w_s
    server:    θ ← Σ_s α_s w_s + (w_t − θ) without the head,   α = softmax over s of −I_s

A round has two trips, as the target needs the sources' models for I_s. All start from θ: so the paper's gain in I,
before a source's training less after it, has a first term that all share, and the softmax drops it. I_s is per example.
The paper does not say what becomes of the target's own steps, what a is, or how D_s is trained; this is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State, represent
from rayfed.algorithms.common.domain_pairs import SOURCE, TARGET, DomainPairs
from rayfed.algorithms.common.full_participation import refuse_sampling
from rayfed.algorithms.common.target_clusters import spread
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights, only, tree_map


@dataclass(frozen=True, kw_only=True)
class FADA(DomainPairs):
    """Sends weights and features; a source gets its discriminator, the target all of them and the sources' models.
    Clients keep their trained model until the second trip. Scored: the target's model, which the server has."""

    name: ClassVar[str] = "fada"
    reference: ClassVar[str] = "Peng et al. 2020, Alg. 1; Li, He and Song 2023, appendix C"
    averaged: ClassVar[tuple[str, ...]] = ()
    supports_loss_terms: ClassVar[bool] = False
    refuses_unseen_clients: ClassVar[str] = "has one target and its sources, and an unseen client is neither"

    weight_adversary: float = option(0.1, low=0, help="a, weight of confusing the discriminators")

    def check(self, problem: ProblemSpec) -> None:
        refuse_sampling(problem, self.name, "weighs the models of all sources")
        clients = problem.task.num_clients
        if not 0 <= self.target < clients or clients < 2:
            raise UsageError(f"algorithm.target={self.target}: must be one of 2 clients or more; there are {clients}")
        if not problem.task.feature_shape:
            raise UsageError(f"algorithm.name={self.name}: the model needs a split point, features(x) and a head")

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        return (f"algorithm.target={self.target}: the model is for this client; the scores of others are no result",)

    def init(self, ctx: Context) -> State:
        return super().init(ctx) | {"discriminators": self.drawn(ctx)}

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return self, WeighSources(self)

    def unicast(self, ctx: Context, server: State) -> State:
        own = ctx.client == self.target
        place = slice(None) if own else [self.sources(ctx).index(ctx.client)]
        return {"discriminators": tree_map(lambda leaf: leaf[place], server["discriminators"])}

    def start(self, ctx: Context, client: State, down: State) -> State:
        own, pairs = ctx.client == self.target, len(self.sources(ctx))
        return super().start(ctx, client, down) | {
            # of a source as many copies as the target has discriminators, so that all work has one shape
            "pairs": tree_map(lambda leaf: leaf.expand(pairs, *leaf.shape[1:]), down["discriminators"]),
            "labelled": torch.tensor(float(not own), device=ctx.task.device),
            "wrong": torch.tensor(SOURCE if own else TARGET, device=ctx.task.device),
        }

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        z, network = output.features.flatten(1), ctx.task.modules["discriminator"]
        wrong = work["wrong"].expand(len(z))
        pairs = [tree_map(lambda leaf, k=k: leaf[k], work["pairs"]) for k in range(len(self.sources(ctx)))]
        confused = torch.stack([F.cross_entropy(network(pair, z)[0], wrong) for pair in pairs]).mean()
        return work["labelled"] * loss + self.weight_adversary * confused, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        z = represent(ctx, work["weights"], data.train).flatten(1)
        return kept | {"trained": work["weights"]}, up | {"representations": z}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return self.gathered(ctx, server, replies)


@dataclass(frozen=True)
class WeighSources(Exchange):
    """Second exchange of a round: the target judges the sources' models, and the server weighs them accordingly."""

    method: FADA

    def unicast(self, ctx: Context, server: State) -> State:
        return {"models": server["models"]} if ctx.client == self.method.target else {}

    def start(self, ctx: Context, client: State, down: State) -> State:
        return {"weights": client["trained"]}  # to be scored as the trained model

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        if ctx.client != self.method.target:
            return client, {}
        spreads = []
        for place in range(len(self.method.sources(ctx))):
            model = tree_map(lambda leaf, place=place: leaf[place], down["models"]) | client["weights"]
            seed = int(torch.randint(2**31 - 1, ()))
            spreads.append(spread(represent(ctx, model, data.train).flatten(1), ctx.task.num_classes, seed))
        return client, {"spreads": torch.tensor(spreads, device=ctx.task.device)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        (spreads,) = [reply.up["spreads"] for reply in replies.each if "spreads" in reply.up]
        alpha = (-spreads.to(ctx.task.device)).softmax(0)
        weights = {
            name: torch.tensordot(alpha, leaf, 1) if leaf.is_floating_point() else leaf.amax(0)
            for name, leaf in server["models"].items()
        }
        weights |= {name: weights[name] + step for name, step in server["moved"].items()}
        return only(server, ("discriminators",)) | {"weights": weights}
