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
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, Finished, ProblemSpec, Replies, State, Stepped
from rayfed.algorithms.common.client_weights import refuse_sampling
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only, scale, stack, tree_map


@dataclass(frozen=True, kw_only=True)
class APPLE(LocalTraining):
    """The mixture of the core models received by the client's p_i is scored."""

    name = "apple"
    reference = "Luo and Wu 2022, Alg. 1"
    traits = replace(
        LocalTraining.traits,
        supports_loss_terms=False,
        default_eval_point="downloaded",
        depends_on_rounds=True,
        refuses_unseen_clients="mixes the core models of all clients, and an unseen client has none among them",
    )
    averaged = ()

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
        clients = ctx.task.num_clients
        core = super().init(ctx)["weights"]
        shares = torch.zeros(clients, device=ctx.task.device)
        return {"cores": stack([core] * clients), "shares": shares}

    def join(self, ctx: Context) -> State:
        clients = ctx.task.num_clients
        client = super().join(ctx)
        device = ctx.task.device
        client["p"] = torch.full((clients,), 1 / clients, device=device)
        client["shares"] = torch.zeros(clients, device=device)
        return client

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"cores": server["cores"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        core = tree_map(itemgetter(ctx.client), down["cores"])
        work = super().start(ctx, client, {"weights": core})
        clients = torch.arange(ctx.task.num_clients, device=ctx.task.device)
        work["is_own"] = (clients == ctx.client).float()
        work["p"] = client["p"]
        work["shares"] = client["shares"]
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        cores = down["cores"]
        weights = work["weights"]
        p = work["p"]
        is_own = work["is_own"]
        theta = weights | mixture(cores, weights, p, is_own)
        grads, loss, buffers = ctx.task.gradients(theta, batch)
        distance = p - work["shares"]
        pull = 2 * self.pull(ctx) * self.mu * distance
        slope = slopes(pull, cores, weights, grads, is_own)
        p_own = (p * is_own).sum()
        of_core = scale(only(grads, cores), p_own)
        ctx.optimizer.update_(weights, grads | of_core, work["optimizer"])
        p = p - ctx.scaled(self.relation_lr) * slope
        return work | {"weights": weights | buffers, "p": p}, {"loss": loss}

    def pull(self, ctx: Context) -> float:
        """Return λ(r)."""
        r = max(ctx.round - 1, 0)  # clients may adapt before round 1
        last = self.pull_rounds * ctx.rounds
        if r >= last:
            return 0.0
        if self.pull_schedule == "exponential":
            return 0.001 ** (r / last)
        return (1 + math.cos(math.pi * r / last)) / 2

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept["p"] = work["p"]
        return kept, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        cores = [reply.up["weights"] for reply in replies.each]
        return server | {"cores": stack(cores)}

    def global_model(self, ctx: Context, server: State) -> Any:
        return None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return weighted_sum(client["p"], down["cores"]) | client["weights"]

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        weights = work["weights"]
        return weights | mixture(down["cores"], weights, work["p"], work["is_own"])


class CollectSizes(Exchange):
    """Setup: the server collects the clients' numbers of training examples."""

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        examples = [float(reply.examples) for reply in replies.each]
        sizes = torch.tensor(examples, device=ctx.task.device)
        return server | {"shares": sizes / sizes.sum()}


@dataclass(frozen=True)
class SendShares(Exchange):
    """Setup: every client receives the shares n_j/Σn and, with `initial=shares`, starts from them."""

    initial: str

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"shares": server["shares"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept = client | {"shares": down["shares"]}
        if self.initial == "shares":
            kept["p"] = down["shares"]
        return kept, {}


def weighted_sum(p: Tensor, cores: Weights) -> Weights:
    """Return Σ_j p_j w_j for core models, each weight [clients, ...], and factors p [clients]."""
    sums = {}
    for name, core in cores.items():
        factors = p.to(core.dtype)
        sums[name] = torch.tensordot(factors, core, 1)
    return sums


def mixture(cores: Weights, weights: Weights, p: Tensor, is_own: Tensor) -> Weights:
    """Return θ = Σ_j p_j w_j for the core models received, each weight [clients, ...], and relations p [clients].

    `weights` replaces the client's own core model, at which `is_own` [clients] is 1; elsewhere it is 0.
    """
    p_own = (p * is_own).sum()
    theta = weighted_sum(p * (1 - is_own), cores)
    for name, of_others in theta.items():
        theta[name] = of_others + p_own * weights[name]
    return theta


def slopes(pull: Tensor, cores: Weights, weights: Weights, grads: Weights, is_own: Tensor) -> Tensor:
    """Return `pull` + ⟨g, w_j⟩ [clients] for the gradient g at the mixture; other arguments as in `mixture`."""
    for name in only(cores, grads):
        g = grads[name]
        rows = cores[name].reshape(len(is_own), -1)
        of_others = torch.tensordot(rows, g.flatten(), 1)
        of_own = (g * weights[name]).sum()
        pull = pull + torch.where(is_own > 0, of_own, of_others)
    return pull
