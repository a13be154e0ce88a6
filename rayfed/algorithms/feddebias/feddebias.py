"""FedDebias: Guo, Tang and Lin 2022, "FedDebias: Reducing the Local Learning Bias Improves Federated Learning on
Heterogeneous Data", Eq. 2, 3, 5, Alg. 1 and 2.

All clients also train on the same pseudo-data D_p. φ is the feature extractor, ω the classifier, θ the weights of a
projector P that only the contrast uses, and φ_g the extractor as received.

    s⁺ = cos(Pφ(x_p), Pφ_g(x_p)),  s⁻ = cos(Pφ(x_p), Pφ(x)),  L_con = softplus(τ2 s⁻ − τ1 s⁺)
    client, each step:  max step  θ ← θ + η ∇L_con
                        min step  (φ, ω) ← (φ, ω) − η ∇[CE(x, y) + λ CE(x_p, 1/C) + μ L_con]
    server:             means of φ, ω, θ, weighted by n_i as in Eq. 1; Alg. 1 has equal weights (`weighting=equal`)

Where the paper is ambiguous: Eq. 5 divides by τ, but its ablations with τ2 = 0 require a multiplication, as above
(`tau_mode`). The negative pair is printed as φ(x_p) with itself; the text and Eq. 6 mean φ(x_p) with φ(x). Pairs are
formed by index: x_j with row j mod |D_p| of D_p. The mean in λ CE is over all of D_p.

Pseudo-data passes through the network separately from x and, like x, in training mode, in φ and in φ_g alike, so that
both normalise in the same way. Before the first step s⁺ is therefore 1, unless the network is itself random (dropout,
or stochastic depth as in CCT), since φ and φ_g draw separately. Only x updates the running statistics of batch norm.

Transfer of D_p (random sample means, RSM): for each mean, the server draws the client that computes it. In the setup
all clients send their means. With `transfer=once` they then receive D_p and keep it. With `each_round`, D_p is sent
with every model, and the round's clients send, with their models, the means that form D_p in the next round.

With `pseudo=mixture`, D_p consists of means of a public proxy dataset, computed by the server. In every step clients
mix each of them with K of their own examples: x̃_p = (x_p + Σ x_k)/(K+1) and ỹ_p = (1/C + Σ y_k)/(K+1) replace x_p and
1/C, also in φ_g(x̃_p). Because x̃_p then contains local data, P receives φ(x̃_p) − ⟨ỹ_p, y⟩ φ(x) in s⁻ (Eq. 6). With K
= 0 nothing is mixed or corrected.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, HandOut, ProblemSpec, Replies, State
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.common.networks import mlp, with_projection
from rayfed.algorithms.common.soft_labels import check_real_inputs, soft
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.feddebias.pseudo_data import CollectMeans, PseudoDataSource, mixture, pooled
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only


def paired_rows(examples: int, pseudo_examples: int, device: torch.device) -> Tensor:
    """Return the row of the pseudo-example with which each of `examples` local examples is compared."""
    return torch.arange(examples, device=device) % pseudo_examples


@dataclass(frozen=True)
class Contrast:
    """L_con, of features or of their projections (Eq. 5 and 6), and the max step on its projector.

    `tau1` and `tau2` are the temperatures of the positive and the negative pairs. If `projects`, features pass through
    the projector, `task.modules["projector"]`.
    """

    tau1: float
    tau2: float
    tau_mode: str
    projects: bool

    def loss(
        self,
        ctx: Context,
        theta: Weights,
        pseudo: Tensor,
        received: Tensor,
        local: Tensor,
        overlap: Tensor | None = None,
    ) -> Tensor:
        """Return L_con, a scalar.

        Args:
            theta: The projector's weights; ignored without a projector.
            pseudo: φ(x_p) [|D_p|, ...].
            received: φ_g(x_p) [|D_p|, ...].
            local: φ(x) [batch, ...].
            overlap: ⟨ỹ_p, y⟩ of each pair [batch], with which mixtures are corrected (Eq. 6).
        """
        rows = paired_rows(len(local), len(pseudo), local.device)
        vectors = [features.flatten(1) for features in (pseudo[rows], received[rows], local)]
        if overlap is not None:
            vectors.append(vectors[0] - overlap[:, None] * vectors[2])
        if self.projects:
            vectors = [ctx.task.modules["projector"](theta, vector)[0] for vector in vectors]
        positive = F.cosine_similarity(vectors[0], vectors[1])
        negative = F.cosine_similarity(vectors[0 if overlap is None else 3], vectors[2])
        if self.tau_mode == "divide":
            return F.softplus(negative / self.tau2 - positive / self.tau1).mean()
        return F.softplus(self.tau2 * negative - self.tau1 * positive).mean()

    def ascend(self, ctx: Context, work: State, batch: Batch) -> None:
        """Take the max step θ ← θ + η ∇L_con, on `work["projector"]` in place."""
        with torch.no_grad():
            pseudo, local = (ctx.task.forward(work["weights"], x).features for x in (work["pseudo"], batch.x))

        def negated(theta: Weights) -> tuple[Tensor, Weights]:
            return -self.loss(ctx, theta, pseudo, work["received_features"], local, work.get("overlap")), {}

        grads, _, _ = gradients(negated, work["projector"])
        ctx.optimizer.update_(work["projector"], grads, work["projector_optimizer"])


@dataclass(frozen=True, kw_only=True)
class FedDebias(FedAvg):
    name: ClassVar[str] = "feddebias"
    reference: ClassVar[str] = "Guo, Tang and Lin 2022, Alg. 1 and 2"
    averaged: ClassVar[tuple[str, ...]] = ("weights", "projector")
    supports_loss_terms: ClassVar[bool] = False
    requires_classes: ClassVar[bool] = True

    # Pseudo-data

    pseudo: str = option("rsm", choices=("rsm", "mixture"), help="means of clients' images, or of a proxy dataset")
    pseudo_samples: int | None = option(None, low=1, high=65536, help="|D_p|; null: the batch size")
    rsm_images: int = option(10, low=1, high=10_000, help="images per mean")
    transfer: str = option("each_round", choices=("each_round", "once"), help="how often clients receive pseudo-data")
    proxy: str = option("photographs", help="proxy of mixture: photographs (scikit-learn's two), noise, or a data.name")
    k_mix: int = option(1, low=0, high=1000, help="mixture: K, local examples per pseudo-example")

    # Component 1: uniform labels on pseudo-data

    lam: float = option(1.0, low=0, help="λ, weight of the uniform labels; 0: component 2 alone")

    # Component 2: the contrast

    mu: float = option(0.5, low=0, help="μ, weight of the contrast; 0: component 1 alone")
    tau1: float = option(2.0, low=0, help="τ1, temperature of local with global features of pseudo-data")
    tau2: float = option(2.0, low=0, help="τ2, temperature of pseudo-data with local data")
    tau_mode: str = option(
        "multiply", choices=("multiply", "divide"), help="whether τ multiplies or divides similarities"
    )
    projector: bool = option(True, help="contrast projected features; else features, without a max step")
    max_step: bool = option(True, help="train the projector; else θ stays as drawn")
    widths: list[int] = option([256, 256, 128], low=1, high=65536, help="widths of the projector's layers")
    projector_in_extractor: bool = option(
        False, help="append an MLP of `widths` to the extractor, without a max step (Fig. 5a)"
    )

    weighting: str = weighting_option("examples", ", as Alg. 1 is printed")

    def __post_init__(self) -> None:
        if not self.widths and (self.projects or self.projector_in_extractor):
            raise UsageError(
                "algorithm.widths=[]: a projector has at least one layer; to go without one, use "
                "algorithm.projector=false"
            )

    @property
    def uses_pseudo_data(self) -> bool:
        """Whether a component that needs pseudo-data is switched on."""
        return bool(self.lam or self.mu)

    @property
    def mixes(self) -> bool:
        """Whether clients mix pseudo-data with their own."""
        return self.pseudo == "mixture" and self.k_mix > 0 and self.uses_pseudo_data

    @property
    def projects(self) -> bool:
        """Whether there is a projector beside the model."""
        return bool(self.mu) and self.projector and not self.projector_in_extractor

    @property
    def ascends(self) -> bool:
        """Whether there is a max step."""
        return self.projects and self.max_step

    @property
    def source(self) -> PseudoDataSource:
        """What pseudo-data is made of."""
        return PseudoDataSource(self.proxy if self.pseudo == "mixture" else None, self.pseudo_samples, self.rsm_images)

    @property
    def contrast(self) -> Contrast:
        """L_con with its max step."""
        return Contrast(self.tau1, self.tau2, self.tau_mode, self.projects)

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)
        self.source.check(problem)

    def adapt(self, ctx: Context) -> Context:
        return ctx.at(task=with_projection(ctx.task, self.widths)) if self.projector_in_extractor else ctx

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"projector": mlp([math.prod(task.feature_shape), *self.widths])} if self.projects else {}

    # Before the first round: θ and D_p

    def init(self, ctx: Context) -> State:
        projector = {"projector": ctx.task.modules["projector"].draw_weights()} if self.projects else {}
        pseudo = self.source.initial(ctx) if self.uses_pseudo_data else {}
        return super().init(ctx) | projector | pseudo

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        if not self.uses_pseudo_data:
            return ()
        collect = (CollectMeans(self.source),) if self.pseudo == "rsm" else ()
        return (*collect, HandOut(("pseudo",))) if self.transfer == "once" else collect

    # A round: the server sends φ, ω, θ and perhaps D_p

    def broadcast(self, ctx: Context, server: State) -> State:
        down = only(server, self.averaged)
        if self.uses_pseudo_data and self.transfer == "each_round":
            down |= self.source.owners(ctx) | {"pseudo": server["pseudo"]}
        return down

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if self.uses_pseudo_data:
            work |= {"pseudo": (down if "pseudo" in down else client)["pseudo"]}
        if self.projects:
            work |= {"projector": down["projector"]}
        if self.ascends:
            fresh = ctx.optimizer.init(down["projector"])
            work |= {"projector_optimizer": client.get("projector_optimizer", fresh)}
        if not self.mu:
            return work
        if self.mixes:
            return work | {"received_weights": work["weights"]}
        with torch.no_grad():
            return work | {"received_features": ctx.task.forward(work["weights"], work["pseudo"]).features}

    # Local training: a max step and a min step on each batch

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        with_pseudo_data = work | self.mixed(ctx, work, batch) if self.mixes else work
        if self.ascends:
            self.contrast.ascend(ctx, with_pseudo_data, batch)
        trained, metrics = super().step(ctx, with_pseudo_data, down, batch)
        return (only(trained, work) | only(work, ("pseudo",)) if self.mixes else trained), metrics

    def mixed(self, ctx: Context, work: State, batch: Batch) -> State:
        """Return the mixtures of this step in place of the pseudo-data, their labels, and ⟨ỹ_p, y⟩ of every pair."""
        x, labels = mixture(work["pseudo"], batch, self.k_mix, ctx.task.num_outputs)
        rows = paired_rows(len(batch.x), len(x), x.device)
        overlap = (labels[rows] * soft(batch.y, ctx.task.num_outputs)).sum(1)
        mixtures: State = {"pseudo": x, "labels": labels, "overlap": overlap}
        if self.mu:
            with torch.no_grad():
                mixtures["received_features"] = ctx.task.forward(work["received_weights"], x).features
        return mixtures

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        """Return the loss of the min step."""
        loss, output = super().loss(ctx, weights, work, down, batch)
        if not self.uses_pseudo_data:
            return loss, output
        pseudo = ctx.task.forward(weights, work["pseudo"])  # its buffers are dropped
        if self.lam:
            labels = work.get("labels", torch.full_like(pseudo.logits, 1 / pseudo.logits.shape[1]))
            loss = loss + self.lam * F.cross_entropy(pseudo.logits, labels)
        if self.mu:
            theta, overlap = work.get("projector", {}), work.get("overlap")
            features = pseudo.features, work["received_features"], output.features
            loss = loss + self.mu * self.contrast.loss(ctx, theta, *features, overlap)
        return loss, output

    # The clients send φ, ω, θ and the means that they were asked for; the server averages and pools

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        up |= self.source.means(ctx, down, data)
        if not self.ascends:
            return kept, up
        moments = only(work, ("projector_optimizer",)) if ctx.keep_optimizer else {}
        return kept | moments, up | only(work, ("projector",))

    def weight(self, ctx: Context, examples: int) -> float:
        return 1.0 if self.weighting == "equal" else super().weight(ctx, examples)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        pseudo = pooled(ctx, replies)
        if self.uses_pseudo_data and self.transfer == "each_round":
            pseudo |= self.source.from_proxy(ctx)
        return server | only(replies.mean, self.averaged) | pseudo
