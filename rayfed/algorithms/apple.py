"""APPLE: Luo and Wu 2022, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", Alg. 1.

    client i:  the model is  θ = Σ_j p_ij w_j  over the core models of all clients;  on each batch  g = ∇f(θ),
               w_i ← w_i − η p_ii g;   p_ij ← p_ij − η₂ (⟨g, w_j⟩ + 2 λ(r) μ (p_ij − n_j/Σn))
               λ(r) = 0.001^(r/L) or (1 + cos(πr/L)) / 2 for r < L, else 0,  r = 0, 1, … the round
               initially p_ij = n_j/Σn
    server:    keeps the w_j and sends all of them to every client

Both steps are taken at once, from the same g; the configured optimiser takes that of w_i. As the p_ij may be negative
and need not sum to 1, they cannot mix batch-norm statistics: all buffers stay with the client. The pull 2 λ μ is the
gradient of the authors' penalty λ μ ‖p − n/Σn‖²; PFLlib has half of it, the cosine, and starts from p_ij = 1/N.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State, Traits
from rayfed.algorithms.common.client_weights import refuse_sampling
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only, scale, stack


@dataclass(frozen=True, kw_only=True)
class APPLE(LocalTraining):
    """The mixture of the core models received by the client's p_i is scored."""

    name: ClassVar[str] = "apple"
    reference: ClassVar[str] = "Luo and Wu 2022, Alg. 1"
    traits: ClassVar[Traits] = replace(
        LocalTraining.traits,
        supports_loss_terms=False,
        default_eval_point="downloaded",
        depends_on_rounds=True,
        refuses_unseen_clients="mixes the core models of all clients, and an unseen client has none among them",
    )
    averaged: ClassVar[tuple[str, ...]] = ()

    relation_lr: float = option(
        1e-3,
        low=0,
        help="η₂, step size of the relations p_ij; 0: constant",
        elsewhere={"authors": "0.001", "PFLlib": "0"},
    )
    initial: str = option(
        "shares",
        choices=("shares", "uniform"),
        help="initial p_ij: shares of examples, or 1/clients",
        elsewhere={"authors": "shares", "PFLlib": "uniform"},
    )
    mu: float = option(
        0.1, low=0, help="μ, pull of p_ij towards the shares of examples", elsewhere={"authors": "0.1", "PFLlib": "0"}
    )
    pull_schedule: str = option(
        "exponential",
        choices=("exponential", "cosine"),
        help="how the pull fades: to a thousandth, or to 0",
        elsewhere={"authors": "exponential", "PFLlib": "cosine"},
    )
    pull_rounds: float = option(
        0.1,
        low=0,
        high=1,
        help="L, end of the pull, as a share of all rounds",
        elsewhere={"authors": "0.1", "PFLlib": "1"},
    )

    def check(self, problem: ProblemSpec) -> None:
        refuse_sampling(problem, self.name, "mixes the models of all clients of the last round")

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return CollectSizes(), SendShares(self.initial)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | frozenset(task.buffers)  # as p need not sum to 1

    def init(self, ctx: Context) -> State:
        count = ctx.task.num_clients
        core = super().init(ctx)["weights"]
        return {"cores": stack([core] * count), "shares": torch.zeros(count, device=ctx.task.device)}

    def join(self, ctx: Context) -> State:
        p = torch.full((ctx.task.num_clients,), 1 / ctx.task.num_clients, device=ctx.task.device)
        return super().join(ctx) | {"p": p, "shares": torch.zeros_like(p)}

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"cores": server["cores"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        is_own = torch.arange(ctx.task.num_clients, device=ctx.task.device) == ctx.client
        core = {name: value[ctx.client] for name, value in down["cores"].items()}
        return super().start(ctx, client, {"weights": core}) | {
            "is_own": is_own.float(),
            "p": client["p"],
            "shares": client["shares"],
        }

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        cores, weights, p, is_own = down["cores"], work["weights"], work["p"], work["is_own"]
        grads, loss, buffers = ctx.task.gradients(weights | mixture(cores, weights, p, is_own), batch)
        slope = slopes(2 * self.pull(ctx) * self.mu * (p - work["shares"]), cores, weights, grads, is_own)
        descent = grads | scale(only(grads, cores), (p * is_own).sum())
        ctx.optimizer.update_(weights, descent, work["optimizer"])
        return work | {"weights": weights | buffers, "p": p - ctx.scaled(self.relation_lr) * slope}, {"loss": loss}

    def pull(self, ctx: Context) -> float:
        """Return λ(r)."""
        r, last = max(ctx.round - 1, 0), self.pull_rounds * ctx.rounds  # clients may adapt before round 1
        if r >= last:
            return 0.0
        return 0.001 ** (r / last) if self.pull_schedule == "exponential" else (1 + math.cos(math.pi * r / last)) / 2

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept | {"p": work["p"]}, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"cores": stack([reply.up["weights"] for reply in replies.each])}

    def global_model(self, ctx: Context, server: State) -> Any:
        return None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        cores = {name: torch.tensordot(client["p"].to(core.dtype), core, 1) for name, core in down["cores"].items()}
        return cores | client["weights"]

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return work["weights"] | mixture(down["cores"], work["weights"], work["p"], work["is_own"])


class CollectSizes(Exchange):
    """Setup: the server collects the clients' numbers of training examples."""

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        sizes = torch.tensor([float(reply.examples) for reply in replies.each], device=ctx.task.device)
        return server | {"shares": sizes / sizes.sum()}


@dataclass(frozen=True)
class SendShares(Exchange):
    """Setup: every client receives the shares n_j/Σn and, with `initial=shares`, starts from them."""

    initial: str

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"shares": server["shares"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        p = down["shares"] if self.initial == "shares" else client["p"]
        return client | {"shares": down["shares"], "p": p}, {}


def mixture(cores: Weights, weights: Weights, p: Tensor, is_own: Tensor) -> Weights:
    """Return θ = Σ_j p_j w_j for the core models received, each weight [clients, ...], and relations p [clients].

    `weights` replaces the client's own core model, at which `is_own` [clients] is 1; elsewhere it is 0.
    """
    p_others, p_own = p * (1 - is_own), (p * is_own).sum()
    others = {name: torch.tensordot(p_others.to(core.dtype), core, 1) for name, core in cores.items()}
    return {name: other + p_own * weights[name] for name, other in others.items()}


def slopes(pull: Tensor, cores: Weights, weights: Weights, grads: Weights, is_own: Tensor) -> Tensor:
    """Return `pull` + ⟨g, w_j⟩ [clients] for the gradient g at the mixture; other arguments as in `mixture`."""
    for name in only(cores, grads):
        products = torch.tensordot(cores[name].reshape(len(is_own), -1), grads[name].flatten(), 1)
        pull = pull + torch.where(is_own > 0, (grads[name] * weights[name]).sum(), products)
    return pull
