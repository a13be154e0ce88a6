"""FedDebias: Guo, Tang and Lin 2022, "FedDebias: Reducing the Local Learning Bias Improves Federated Learning on
Heterogeneous Data", Eq. 2, 3, 5, Alg. 1 and 2.

Beside its own data every client sees pseudo-data D_p, alike everywhere. φ is the extractor, ω the classifier, θ a
projection P that serves the contrast alone, φ_g the extractor as received.

    s⁺ = cos(Pφ(x_p), Pφ_g(x_p)),  s⁻ = cos(Pφ(x_p), Pφ(x)),  L_con = softplus(τ2 s⁻ − τ1 s⁺)
    client, each step:  θ ← θ + η ∇L_con,  then
                        (φ, ω) ← (φ, ω) − η ∇[CE(x, y) + λ CE(x_p, 1/C) + μ L_con]
    server:             means of φ, ω, θ, weighted by n_i

Eq. 5 divides by τ; but the ablations with τ2 = 0 want it multiplied, as above (`tau_mode`). Its negative is printed as
φ(x_p) with itself; text and Eq. 6 mean φ(x_p) with φ(x). Pairs are formed by index: x_j with x_p of row j mod |D_p|.
λ CE is over all of D_p. x_p goes through the network apart from x and, like it, in training mode: in φ and in φ_g, so
that both normalise alike. Before the first step s⁺ = 1 then, unless the network draws at random (dropout, stochastic
depth as in CCT): φ and φ_g draw apart. Only x moves the running statistics of batch norm.

How D_p travels (random sample means, RSM): for each mean the server draws the client that makes it. In the setup all
clients send theirs. With `transfer=once` they then get D_p, and keep it; with `each_round` D_p goes down with the
model, and the round's clients send with their models the means of which the next round's D_p is made.

pseudo=mixture: D_p are means of a public proxy data set, made by the server. Clients mix each with K of their own
examples, other ones in every step: x̃_p = (x_p + Σ x_k)/(K+1), ỹ_p = (1/C + Σ y_k)/(K+1) in place of x_p and 1/C, in
φ_g(x̃_p), too. As x̃_p then holds local data, P is given φ(x̃_p) − ⟨ỹ_p, y⟩ φ(x) in s⁻ (Eq. 6). With K = 0 nothing is
mixed and nothing corrected.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.common.projected_contrast import ProjectedContrast
from rayfed.algorithms.common.pseudo_data import mixture
from rayfed.algorithms.common.pseudo_data_exchange import PseudoDataExchange
from rayfed.algorithms.common.soft_labels import soft
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights, only
from rayfed.models.single_example_batchnorm import trains_on_single_examples


@dataclass(frozen=True, kw_only=True)
class FedDebias(ProjectedContrast, PseudoDataExchange):
    name: ClassVar[str] = "feddebias"
    reference: ClassVar[str] = "Guo, Tang and Lin 2022, Alg. 1 and 2"
    supports_loss_terms: ClassVar[bool] = False
    averaged: ClassVar[tuple[str, ...]] = ("weights", "projector")

    lam: float = option(1.0, low=0, help="λ, weight of the uniform labels on pseudo-data; 0: component 2 alone")
    k_mix: int = option(1, low=0, high=1000, help="mixture: K, local examples in a pseudo-example")

    @property
    def used(self) -> bool:
        return bool(self.lam or self.mu)

    @property
    def mixes(self) -> bool:
        return self.pseudo == "mixture" and self.k_mix > 0 and self.used

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        lone = self.used and self.pseudo_samples == 1
        if lone and not trains_on_single_examples(problem.task, problem.shape, tokens=problem.tokens):
            raise UsageError("algorithm.pseudo_samples=1: the model's batch norm cannot train on one; use at least 2")

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if not work or not self.mu:
            return work
        if self.mixes:
            return work | {"sender": work["weights"]}
        with torch.no_grad():
            return work | {"received": ctx.task.forward(work["weights"], work["pseudo"]).features}

    def mixed(self, ctx: Context, work: State, batch: Batch) -> State:
        """What this step's mixture puts in the place of the pseudo-data, and ⟨ỹ_p, y⟩ of every pair."""
        x, labels = mixture(work["pseudo"], batch, self.k_mix, ctx.task.num_classes)
        pairs = torch.arange(len(batch.x), device=x.device) % len(x)
        overlap = (labels[pairs] * soft(batch.y, ctx.task.num_classes)).sum(1)
        made: State = {"pseudo": x, "labels": labels, "overlap": overlap}
        if self.mu:
            with torch.no_grad():
                made["received"] = ctx.task.forward(work["sender"], x).features
        return made

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        seen = work | self.mixed(ctx, work, batch) if self.mixes else work
        if self.ascends:
            self.ascend(ctx, seen, batch)
        done, metrics = super().step(ctx, seen, down, batch)
        return (only(done, work) | only(work, ("pseudo",)) if self.mixes else done), metrics

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        if not self.used:
            return loss, output
        pseudo = ctx.task.forward(weights, work["pseudo"])  # its buffers are dropped
        if self.lam:
            labels = work.get("labels", torch.full_like(pseudo.logits, 1 / pseudo.logits.shape[1]))
            loss = loss + self.lam * F.cross_entropy(pseudo.logits, labels)
        if self.mu:
            theta = work.get("projector", {})
            features, overlap = (pseudo.features, work["received"], output.features), work.get("overlap")
            loss = loss + self.mu * self.contrast(ctx, theta, *features, overlap)
        return loss, output
