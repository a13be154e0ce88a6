"""Methods that weigh clients by the losses f_i that they send with their models.

AFL: Mohri et al. 2019, "Agnostic Federated Learning". Gen-AFL and variance minimisation (VM): de Luca et al. 2022,
"Mitigating Data Heterogeneity in Federated Learning with Data Augmentation", Alg. 1, Prop. 1, Eq. 22 to 24. GroupDRO
between clients: Sagawa et al. 2020, "Distributionally Robust Neural Networks for Group Shifts", Alg. 1, as in
FedDebias, appendix A.

    afl, gen_afl:  min over θ, max over λ in Δ(λ_min) of Σ λ_i f_i(θ),   Δ(λ_min) = {Σ λ_i = 1, λ_i ≥ λ_min};
                   afl: λ_min = 0
        client:  sends f_i(θ_t) over its augmented training set, and θ^(i) after training from θ_t
        server:  λ_i = p_i = n_i/N in round 1;  from round 2 on λ ← Π(λ + η_λ f(θ_t)) for the round's clients S_t
                 θ_{t+1} = Σ_{S_t} λ_i θ^(i) / Σ_{S_t} λ_i
    vm:            min over θ of Σ p_i f_i(θ) + β Var_p(f),  p_i = n_i/N over S_t
        client:  sends θ^(i) and f_i(θ^(i)) over its augmented training set
        server:  θ_{t+1} = Σ w_i θ^(i),  w_i = p_i (1 + 2β (f_i − f̄)),  f̄ = Σ p_i f_i
    group_dro:
        client:  sends θ^(i) and f_i(θ_t) over its training data
        server:  q_i ← q_i exp(η f_i),  θ_{t+1} = Σ (q_i / Σ_j q_j) θ^(i),  q_i = 1 before the first round

The papers update λ after aggregation, with the losses of the new model, which takes a second exchange. Here clients
send these losses with their reply in the next round. In de Luca et al.'s code λ_min is never passed on, so its Gen-AFL
is AFL. If a round samples clients (line 4), the λ of the others stay. Π keeps the sum of the λ of S_t, so that λ moves
among clients of the same round only. Where this sum is not positive, the round weighs its clients by p_i.

VM is Eq. 24 with p_i in place of 1/n. Since Σ p_i (f_i − f̄) = 0, the step θ_t − Δ is a weighted mean of models. Alg. 2
as printed has both 1/n and p_i, which makes the step n times smaller. The authors' code uses w_i = 1/n + 2β (f_i − f̄)
with plain means, an n times larger β (`variant=code`). The paper does not say where f_i is evaluated. At θ_t training
diverges for β = 10, so it is evaluated at θ^(i), as in their code. In a round that samples clients, all sums are over
S_t; as Σ p_i (Δ_i − Δ̄) = 0, an f̄ that includes older losses of the others changes nothing.

If a round of GroupDRO samples clients, i and j range over these, and the q of the others stay. The server keeps log q,
which cannot overflow. f_i is taken over all training data of the client; released code takes its first batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, Finished, ProblemSpec, Replies, Reply, State, mean_loss
from rayfed.algorithms.common.client_weights import (
    check_smallest_weight,
    refuse_averaged_variances,
    reported_losses,
    shares,
)
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import Diverged
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class AFL(FedAvg):
    name = "afl"
    reference = "Mohri et al. 2019; de Luca et al. 2022, Alg. 1 with lambda_min = 0"

    lambda_lr: float = option(0.1, low=0, help="η_λ, step size of the clients' weights along their losses")
    lambda_min: float = option(0.0, help="smallest weight of a client, at most 1/clients")

    def check(self, problem: ProblemSpec) -> None:
        if self.lambda_min < 0:
            refuse_averaged_variances(problem, self.name, self.personal(problem.task))
        check_smallest_weight(self.lambda_min, problem.task.num_clients, "clients")

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["lambda"] = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return server

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return (CollectShares(self),)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        received = self.downloaded_model(ctx, client, down)
        up["loss"] = mean_loss(ctx, received, data.as_trained)
        return kept, up

    def next_lambda(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Tensor:
        """Return λ [clients] after the update of those that replied."""
        lambdas = server["lambda"].clone()
        sampled = [reply.client for reply in replies]
        if ctx.round > 1:
            total = 1.0
            if len(sampled) < len(lambdas):
                total = float(lambdas[sampled].sum())
            moved = lambdas[sampled] + self.lambda_lr * reported_losses(replies)
            lambdas[sampled] = project_simplex(moved, self.lambda_min, total)
        return lambdas

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        lambdas = self.next_lambda(ctx, server, replies)
        sampled = lambdas[[reply.client for reply in replies]]
        if len(sampled) == ctx.task.num_clients:
            return sampled.tolist()
        weights = shares(self, ctx, replies)
        if sampled.sum() > 0:
            weights = sampled / sampled.sum()
        reason = "the λ of the round's clients nearly cancel; use a larger lambda_min"
        return bounded(self, ctx, replies, weights, reason)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        lambdas = self.next_lambda(ctx, server, replies.each)
        return super().aggregate(ctx, server, replies) | {"lambda": lambdas}


@dataclass(frozen=True, kw_only=True)
class GenAFL(AFL):
    """AFL with weights that may be negative."""

    name = "gen_afl"
    reference = "de Luca et al. 2022, Alg. 1 and Prop. 1"

    lambda_min: float = option(-1.0, help="smallest weight of a client, at most 1/clients; 0 is AFL")


@dataclass(frozen=True)
class CollectShares(Exchange):
    """Setup: the server learns the shares p_i, from which λ starts."""

    method: AFL

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"lambda": shares(self.method, ctx, replies.each)}


LARGEST_WEIGHT = 5.0  # the paper's runs stay below 1; beyond this value, rounds amplify each other's error


def bounded(method: FedAvg, ctx: Context, replies: Sequence[Reply], weights: Tensor, reason: str) -> list[float]:
    """Return `weights` [replies]; raise Diverged, with the `reason`, if one is beyond ±LARGEST_WEIGHT."""
    values = weights.tolist()
    for reply, weight in zip(replies, values, strict=True):
        if not abs(weight) <= LARGEST_WEIGHT:
            raise Diverged(
                f"round {ctx.round}, client {reply.client}: algorithm.name={method.name} gives the weight "
                f"{weight:.3g}, beyond ±{LARGEST_WEIGHT:g}; {reason}"
            )
    return values


def variance_weights(losses: Tensor, shares: Tensor, beta: float, variant: str) -> Tensor:
    """Return the clients' weights [n], which sum to 1 and may be negative."""
    if variant == "code":
        deviations = losses - losses.mean()
        return 1 / len(losses) + 2 * beta * deviations
    deviations = losses - (shares * losses).sum()
    return shares * (1 + 2 * beta * deviations)


@dataclass(frozen=True, kw_only=True)
class VM(FedAvg):
    name = "vm"
    reference = "de Luca et al. 2022, Eq. 22 to 24 and Alg. 2"

    beta: float = option(10.0, low=0, help="β, weight of the losses' variance; paper: 10 on Rotated MNIST, 0.5 on PACS")
    variant: str = option("paper", choices=("paper", "code"), help="weights by Eq. 24, or by the authors' code")

    def check(self, problem: ProblemSpec) -> None:
        refuse_averaged_variances(problem, self.name, self.personal(problem.task))

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        up["loss"] = mean_loss(ctx, work["weights"], data.as_trained)
        return kept, up

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        losses = reported_losses(replies)
        weights = variance_weights(losses, shares(self, ctx, replies), self.beta, self.variant)
        reason = f"the clients' losses are too far apart for algorithm.beta={self.beta:g}, use a smaller one"
        return bounded(self, ctx, replies, weights, reason)


@dataclass(frozen=True, kw_only=True)
class GroupDRO(FedAvg):
    name = "group_dro"
    reference = "Sagawa et al. 2020, Alg. 1; Guo, Tang and Lin 2022, appendix A"
    weighting: ClassVar[str] = "equal"  # type: ignore[misc]  # q weighs

    q_lr: float = option(0.01, low=0, help="η, step size of log q along the losses; 0: clients' plain mean")

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["log_q"] = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return server

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        received = self.downloaded_model(ctx, client, down)
        up["loss"] = mean_loss(ctx, received, data.train)
        return kept, up

    def next_log_q(self, server: State, replies: Sequence[Reply]) -> Tensor:
        """Return log q [clients], not normalised, after a step along the losses of those that replied."""
        log_q: Tensor = server["log_q"].clone()
        for reply in replies:
            loss = reply.up["loss"].to(log_q)
            log_q[reply.client] += self.q_lr * loss
        return log_q

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        log_q = self.next_log_q(server, replies)
        sampled = log_q[[reply.client for reply in replies]]
        return sampled.softmax(0).tolist()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        log_q = self.next_log_q(server, replies.each)
        return super().aggregate(ctx, server, replies) | {"log_q": log_q}


def project_simplex(y: Tensor, lowest: float = 0.0, total: float = 1.0) -> Tensor:
    """Return the point of {x ≥ lowest, Σx = total} that is nearest to `y` [n].

    With m = `lowest`, it is x_i = max(y_i + τ, m), with τ such that the sum is right (Duchi et al. 2008 for m = 0). It
    equals the scaling from Δ(0) of de Luca et al. 2022, Prop. 1: (1 − n m) Π_Δ((y − m)/(1 − n m)) + m. That scaling
    loses the digits of y where m is far below 0; the form used here does not. `lowest` is at most total/n.
    """
    n = len(y)
    if total - n * lowest <= 1e-9:
        return torch.full_like(y, total / n)
    y_cpu = y.cpu()  # CUDA has no deterministic `cumsum`
    descending = y_cpu.sort(descending=True).values
    free = torch.arange(1, n + 1, dtype=y.dtype)  # the `free` largest are above `lowest`
    of_others = (n - free) * lowest
    shifts = (total - of_others - descending.cumsum(0)) / free
    above = descending + shifts > lowest
    tau = shifts[int(above.sum()) - 1]  # the condition holds for a prefix of the sorted numbers
    return (y_cpu + tau).clamp(min=lowest).to(y.device)
