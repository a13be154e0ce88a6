"""FRAug: Chen et al. 2023, "FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation".

Alg. 1 and Eq. 1 to 6, with the scaling of the authors' code. A generator g (ω) that all share makes embeddings, a
network m (φ) of the client's own turns them into residuals on real ones. Client, each step, on a batch (X, y):

    1. θ:  u = f(X), prototypes ū_c follow u;  û = u + λ·m(g(z, y), y),  û_c = ū_{y_c} + λ·m(g(z', y_c), y_c)
           L = (1−κ)·CE(h(u), y) + κ·½[CE(h(sg û), y) + CE(h(sg û_c), y_c)],  κ = min(½, λ),  λ = exp(γ(r−R))
    2. ω:  v = g(z, y_c);  L = CE(h(v), y_c) − α·D(v, f(X))
    3. φ:  û, û_c with λ = 1;  L = ½[−H(h(û)) − H(h(û_c))] + β·½[D(û, f(X)) + D(û_c, ū_{y_c})],  H the entropy
    server: means of θ, without the client's batch norm, and of ω; φ and ū never leave

y_c goes round the classes that the client has seen; rounds r count from 0. A model without batch norm is fine: all of
θ is averaged then. The authors' settings: PACS alpha=10 distance_rt=mse; digits distance_g=prototype_mse (unbounded
below: watch `generated_norm`) interpolate=false; OfficeHome generator_bn=local; SGD 0.01 with momentum 0.5 for θ.
With `augmenter` = uniform, laplace or gaussian there is step 1 alone, û being u plus plain noise of scale γ, the same
at every round. The noise baselines of table 7 augment u alone: embeddings=u, without which ū_c plus noise is û_c.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import ClientData, Context, Replies, State
from rayfed.algorithms.common.fraug_stages import Stages
from rayfed.core.batch_norm import batch_norm_names, batch_norm_statistics
from rayfed.core.network import weights_of
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import only, without


@dataclass(frozen=True, kw_only=True)
class FRAug(Stages):
    name: ClassVar[str] = "fraug"
    reference: ClassVar[str] = "Chen et al. 2023, Alg. 1, Eq. 1 to 6"
    supports_loss_terms: ClassVar[bool] = False
    requires_hard_labels: ClassVar[bool] = True
    averaged: ClassVar[tuple[str, ...]] = ("weights", "generator")
    default_eval_point: ClassVar[str] = "downloaded"

    keep_optimizer: bool = option(True, help="keep all three optimisers' moments with the client between rounds")
    bn_mode: str = option("stats", choices=("all", "stats"), help="batch norm left with clients: all, or statistics")
    generator_bn: str = option("averaged", choices=("averaged", "local"), help="batch norm of the generator")
    uniform: bool = option(False, help="average with equal weights, as Alg. 1 is printed, and not by training examples")

    def personal(self, task: Task) -> frozenset[str]:
        found = batch_norm_names if self.bn_mode == "all" else batch_norm_statistics
        return task.personal_names | found(task.model.module)

    def kept(self, task: Task) -> frozenset[str]:
        """Names of the generator's weights that stay with the client."""
        local = self.generates and self.generator_bn == "local"
        return batch_norm_names(task.modules["generator"].module) if local else frozenset()

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        if not self.generates:
            return server
        return server | {"generator": without(ctx.task.modules["generator"].draw_weights(), self.kept(ctx.task))}

    def join(self, ctx: Context) -> State:
        modules, device = ctx.task.modules, ctx.task.device
        shape = (ctx.task.num_classes, *ctx.task.feature_shape)
        state: State = {
            "prototypes": torch.zeros(shape, device=device),
            "seen": torch.zeros(shape[0], dtype=torch.bool, device=device),
            "position": torch.zeros((), dtype=torch.long, device=device),  # in the round of the classes
        }
        if self.generates:
            state["generator"] = only(weights_of(modules["generator"].module), self.kept(ctx.task))
        if self.transforms:
            state["rtnet"] = modules["rtnet"].draw_weights()
        return super().join(ctx) | state

    def broadcast(self, ctx: Context, server: State) -> State:
        return server

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work |= only(client, ("prototypes", "seen", "position", "rtnet"))
        if self.generates:
            work["generator"] = down["generator"] | client["generator"]
        for part, network in ctx.task.modules.items():
            fresh = self.sgd(part).init(only(work[part], network.parameters))
            work[f"optimizer_{part}"] = client.get(f"optimizer_{part}", fresh)
        return work

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        state, up = super().finish(ctx, work, client, down, data)
        state |= only(work, ("prototypes", "seen", "position", "rtnet"))
        if self.keep_optimizer:
            state |= only(work, [f"optimizer_{part}" for part in ctx.task.modules])
        if self.generates:
            names = self.kept(ctx.task)
            state["generator"] = only(work["generator"], names)
            up["generator"] = without(work["generator"], names)
        return state, up

    def weight(self, ctx: Context, examples: int) -> float:
        return 1.0 if self.uniform else super().weight(ctx, examples)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | replies.mean
