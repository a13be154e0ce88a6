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
that both normalise alike and s⁺ = 1 before the first step. Only x moves the running statistics of batch norm.

How D_p travels (random sample means, RSM): for each mean the server draws the client that makes it. In the setup all
clients send theirs. With `transfer=once` they then get D_p, and keep it; with `each_round` D_p goes down with the
model, and the round's clients send with their models the means of which the next round's D_p is made.

pseudo=mixture: D_p are means of a public proxy data set, made by the server. Clients mix each with K of their own
examples, other ones in every step: x̃_p = (x_p + Σ x_k)/(K+1), ỹ_p = (1/C + Σ y_k)/(K+1) in place of x_p and 1/C, in
φ_g(x̃_p), too. As x̃_p then holds local data, P is given φ(x̃_p) − ⟨ỹ_p, y⟩ φ(x) in s⁻ (Eq. 6). With K = 0 nothing is
mixed and nothing corrected.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Phase, Replies, Setting, State
from rayfed.algorithms.discriminator import mlp
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.projected import with_projection
from rayfed.algorithms.proxy_data import check_proxy, proxy_means
from rayfed.algorithms.pseudo_data import draw_owners, mixture, sample_means
from rayfed.algorithms.soft_labels import check_real_inputs, soft
from rayfed.errors import UsageError
from rayfed.network import gradients
from rayfed.options import option
from rayfed.task import Batch, Output, Task
from rayfed.tree import Weights, only


@dataclass(frozen=True, kw_only=True)
class FedDebias(FedAvg):
    name: ClassVar[str] = "feddebias"
    source: ClassVar[str] = "Guo, Tang and Lin 2022, Alg. 1 and 2"
    averaged: ClassVar[tuple[str, ...]] = ("weights", "projector")

    lam: float = option(1.0, low=0, help="λ, weight of the uniform labels on pseudo-data; 0: component 2 alone")
    mu: float = option(0.5, low=0, help="μ, weight of the contrast; 0: component 1 alone, without a projector")
    tau1: float = option(2.0, low=0, help="τ1, of local and global features of pseudo-data")
    tau2: float = option(2.0, low=0, help="τ2, of pseudo-data and local data")
    tau_mode: str = option("multiply", choices=("multiply", "divide"), help="what τ does to a similarity")
    max_step: bool = option(True, help="train the projector against the model; false: it stays as it was drawn")
    projector: bool = option(True, help="false: compare the features themselves, without a max step")
    widths: list[int] = option([256, 256, 128], low=1, help="widths of the projector's layers, the output last")
    projector_in_extractor: bool = option(False, help="an MLP of `widths` ends the extractor; no max step (Fig. 5a)")
    pseudo: str = option("rsm", choices=("rsm", "mixture"), help="means of clients' images, or of a proxy data set")
    k_mix: int = option(1, low=0, help="mixture: K, local examples in a pseudo-example")
    proxy: str = option("photographs", help="mixture: photographs (scikit-learn's two), noise, or a name for data.name")
    pseudo_samples: int | None = option(None, low=1, help="|D_p|; null: the batch size")
    rsm_images: int = option(10, low=1, help="images in a mean")
    transfer: str = option("each_round", choices=("each_round", "once"), help="how often clients get pseudo-data")

    @property
    def setup_exchanges(self) -> int:
        if not (self.lam or self.mu):
            return 0
        return (self.transfer == "once") + (self.pseudo == "rsm")

    @property
    def mixes(self) -> bool:
        return self.pseudo == "mixture" and self.k_mix > 0 and bool(self.lam or self.mu)

    @property
    def projects(self) -> bool:
        return bool(self.mu) and self.projector and not self.projector_in_extractor

    def check(self, setting: Setting) -> None:
        for key in ("tau1", "tau2"):
            if self.tau_mode == "divide" and not getattr(self, key):
                raise UsageError(f"algorithm.{key}=0: cannot be divided by; use algorithm.tau_mode=multiply")
        check_real_inputs(setting, self.name)
        if self.pseudo == "mixture":
            check_proxy(self.proxy, setting.task.inputs)

    def adapt(self, ctx: Context) -> Context:
        return ctx.at(task=with_projection(ctx.task, self.widths)) if self.projector_in_extractor else ctx

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"projector": mlp([math.prod(task.feature_shape), *self.widths])} if self.projects else {}

    def init(self, ctx: Context) -> State:
        drawn = {"projector": ctx.task.modules["projector"].initial()} if self.projects else {}
        pseudo = {"pseudo": torch.zeros(0, device=ctx.task.device)} if self.setup_exchanges else {}
        return super().init(ctx) | drawn | pseudo | self.from_proxy(ctx)

    def from_proxy(self, ctx: Context) -> State:
        """New pseudo-data of the proxy's, where that is what it is made of."""
        if self.pseudo != "mixture" or not (self.lam or self.mu):
            return {}
        count = self.pseudo_samples or ctx.batch_size
        return {"pseudo": proxy_means(self.proxy, ctx.task.inputs, count, self.rsm_images).to(ctx.task.device)}

    def broadcast(self, ctx: Context, server: State) -> State:
        asked: State = {}
        if self.pseudo == "rsm":
            asked = {"owners": draw_owners(ctx.cohort, self.pseudo_samples or ctx.batch_size)}
        if ctx.stage == "setup":
            return asked if asked and ctx.trip == 0 else {"pseudo": server["pseudo"]}
        down = only(server, self.averaged)
        if (self.lam or self.mu) and self.transfer == "each_round":
            down |= asked | {"pseudo": server["pseudo"]}
        return down

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return () if ctx.stage == "setup" else super().phases(ctx)

    def start(self, ctx: Context, client: State, down: State) -> State:
        if ctx.stage == "setup":
            return {}
        work = super().start(ctx, client, down)
        if self.lam or self.mu:
            work["pseudo"] = down["pseudo"] if "pseudo" in down else client["pseudo"]
        if self.mu and self.mixes:
            work["sender"] = work["weights"]
        elif self.mu:
            with torch.no_grad():
                work["received"] = ctx.task.forward(work["weights"], work["pseudo"]).features
        if self.projects:
            work |= {"projector": down["projector"], "ascent": ctx.optimizer.init(down["projector"])}
        return work

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

    def contrast(
        self,
        ctx: Context,
        theta: Weights,
        local: Tensor,
        received: Tensor,
        own: Tensor,
        overlap: Tensor | None = None,
    ) -> Tensor:
        """L_con of features: φ(x_p) and φ_g(x_p), both [|D_p|, ...], and φ(x) [batch, ...]; with ⟨ỹ_p, y⟩, Eq. 6."""
        pairs = torch.arange(len(own), device=own.device) % len(local)
        parts = [part.flatten(1) for part in (local[pairs], received[pairs], own)]
        if overlap is not None:
            parts.append(parts[0] - overlap[:, None] * parts[2])
        if self.projects:
            parts = [ctx.task.modules["projector"](theta, part)[0] for part in parts]
        positive = F.cosine_similarity(parts[0], parts[1])
        negative = F.cosine_similarity(parts[0 if overlap is None else 3], parts[2])
        if self.tau_mode == "divide":
            return F.softplus(negative / self.tau2 - positive / self.tau1).mean()
        return F.softplus(self.tau2 * negative - self.tau1 * positive).mean()

    def ascend(self, ctx: Context, work: State, batch: Batch) -> None:
        """The max step, on `work["projector"]` in place."""
        with torch.no_grad():
            local, own = (ctx.task.forward(work["weights"], x).features for x in (work["pseudo"], batch.x))

        def negated(theta: Weights) -> tuple[Tensor, Weights]:
            return -self.contrast(ctx, theta, local, work["received"], own, work.get("overlap")), {}

        grads, _, _ = gradients(negated, work["projector"])
        ctx.optimizer.update_(work["projector"], grads, work["ascent"])

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        seen = work | self.mixed(ctx, work, batch) if self.mixes else work
        if self.projects and self.max_step:
            self.ascend(ctx, seen, batch)
        done, metrics = super().step(ctx, seen, down, batch)
        return (only(done, work) | only(work, ("pseudo",)) if self.mixes else done), metrics

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        if not (self.lam or self.mu):
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

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        up: State
        if ctx.stage == "setup":
            kept, up = client | only(down, ("pseudo",)), {}
        else:
            kept, up = super().finish(ctx, work, client, down, data)
            if self.projects and self.max_step:
                up["projector"] = work["projector"]
        if "owners" in down and (count := int((down["owners"] == ctx.client).sum())):
            up["means"] = sample_means(data.train, count, self.rsm_images)
        return kept, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        means = [reply.up["means"] for reply in replies.each if "means" in reply.up]
        fresh = {"pseudo": torch.cat(means).to(ctx.task.device)} if means else {}
        if self.transfer == "each_round":
            fresh |= self.from_proxy(ctx)
        return server | only(replies.mean, self.averaged) | fresh
