"""LoRA with clients of different ranks, where layers compute W x + s B A x with W frozen (Hu et al. 2022).

FLoRA: Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations".
HetLoRA: Cho et al. 2024, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models".

    r_i: the rank of client i, whose factors are A_i [r_i, in] and B_i [out, r_i];  other weights are those of FedAvg

    flora:     client:  A_i drawn anew and B_i = 0 in every round, then SGD on f_i;  sends A_i and B_i
               server:  stacks A = (p_1 A_1; …; p_n A_n) and B = (B_1, …, B_n), so that B A = Σ_i p_i B_i A_i
                        W ← W + s B A
    het_lora:  client:  A_i and B_i ← the first r_i rows of A and columns of B, then SGD on
                        f_i + λ Σ_layers ‖B_i[:, k:]‖ ‖A_i[k:]‖ with k = ⌊γ r_i⌋;
                        r_i ← k for good if that sum is now smaller than in what it received
               server:  fills A_i and B_i up with zeros, and takes their mean in each layer by ‖B_i A_i‖ / Σ_j ‖B_j A_j‖

FedIT (Zhang et al. 2024), the mean of A and of B, is `fedavg`; FedSA-LoRA (Guo et al. 2025), the mean of A alone, is
`fedavg` with `algorithm.personal="*lora_B*"`; FFA-LoRA (Sun et al. 2024), the mean of B beside a common frozen A, is
`fedavg` with `model.lora.train=b`.

s is the model's alpha/rank for all clients. In FLoRA the server sends W, with all rounds in it, to whoever takes
part. In the paper every client takes part, receives the last stack and adds it to a W of its own; the column
`bytes_formula` has the bytes of that. HetLoRA's paper does not say how a client with several layers prunes its one
rank: here by the sum. The defaults of γ and λ are rayfed's, not checked against the paper's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Finished, ProblemSpec, Replies, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.modules import copied
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, numel, only, without

A = ".lora_A."
B = ".lora_B."


class Factors(NamedTuple):
    """The names of a layer's trained factors A and B."""

    a: str
    b: str


def factor_names(task: Task) -> dict[str, Factors]:
    """Return the names of the trained factors by the name of their layer."""
    names = {}
    for a in task.trainable:
        b = a.replace(A, B)
        if A in a and b in task.trainable:
            layer, _, _ = a.partition(A)
            names[layer] = Factors(a, b)
    return names


def truncated(factors: Weights, rank: int) -> Weights:
    """Return the first rows of each A and the first columns of each B."""
    first = {}
    for name, value in factors.items():
        part = value[:, :rank]
        if A in name:
            part = value[:rank]
        first[name] = part.clone()
    return first


def filled(factor: Tensor, full: Tensor) -> Tensor:
    """Return a factor with rows and columns of zeros in the shape of `full`."""
    rows = full.shape[0] - factor.shape[0]
    columns = full.shape[1] - factor.shape[1]
    return F.pad(factor, (0, columns, 0, rows))


def own_rank(factors: Weights) -> int:
    """Return the rank of a client's factors; 0 without any."""
    ranks = [len(value) for name, value in factors.items() if A in name]
    return max(ranks, default=0)


@dataclass(frozen=True, kw_only=True)
class OfRanks(FedAvg):
    """FedAvg of all weights but the factors, which are the field `factors`."""

    traits = replace(FedAvg.traits, assumes_uniform_sampling=True, keeps_optimizer=None)

    ranks: list[int] | None = option(
        None, low=1, help="ranks of the clients in turn, at most that of the model, which null gives to all"
    )

    def check(self, problem: ProblemSpec) -> None:
        task = problem.task
        initial = task.initial_weights()
        factors = self.factors(task)
        for name in task.trainable:
            if "lora_" not in name:
                continue
            if name not in factors or name in task.personal_names or initial[name].ndim != 2:
                self._refuse_model(name)
        if not factors:
            self._refuse_model("no LoRA")
        least = min(len(initial[names.a]) for names in factor_names(task).values())
        if self.ranks and max(self.ranks) > least:
            raise UsageError(f"algorithm.ranks={self.ranks}: the model's LoRA has rank {least}, the most of a client")
        if problem.vmap_clients > 1 and self.differ:
            raise UsageError(
                f"placement.vmap_clients={problem.vmap_clients}: clients of algorithm.name={self.name} differ in rank; "
                "use 1"
            )

    def _refuse_model(self, found: str) -> NoReturn:
        raise UsageError(
            f"algorithm.name={self.name}: needs both factors A and B of linear layers trained and sent, as "
            f"model.name=huggingface has them with model.lora and without algorithm.personal; finds {found}"
        )

    @property
    def differ(self) -> bool:
        """Whether clients may have different ranks."""
        return len(set(self.ranks or ())) > 1

    def factors(self, task: Task) -> Weights:
        """Return the initial factors."""
        initial = task.initial_weights()
        factors = {}
        for names in factor_names(task).values():
            factors[names.a] = initial[names.a]
            factors[names.b] = initial[names.b]
        return factors

    def rank(self, ctx: Context, client: int) -> int:
        """Return the rank that a client has at first."""
        if self.ranks:
            return self.ranks[client % len(self.ranks)]
        return own_rank(self.factors(ctx.task))

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["weights"] = without(server["weights"], self.factors(ctx.task))
        return server

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = super().finish(ctx, work, client, down, data)
        weights = up["weights"]
        factors = self.factors(ctx.task)
        return client, {"weights": without(weights, factors), "factors": only(weights, factors)}


@dataclass(frozen=True, kw_only=True)
class FLoRA(OfRanks):
    name = "flora"
    reference = "Wang et al. 2024 (FLoRA), Alg. 1"

    def adapt(self, ctx: Context) -> Context:
        module = ctx.task.model.module
        shared = {id(value): value for value in module.parameters()}
        model: Any = copied(module, shared)
        for name in factor_names(ctx.task):
            base = model.get_submodule(name).base_layer
            weight: nn.Parameter = base._parameters.pop("weight")  # the state has it as a buffer
            base.register_buffer("weight", weight.detach())
        return ctx.at(task=ctx.task.with_model(model))

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        first = [(1.0, self.factors(ctx.task))]
        server["weights"] = self._merged(ctx, server["weights"], first)
        return server

    def start(self, ctx: Context, client: State, down: State) -> State:
        rank = self.rank(ctx, ctx.client)
        drawn = {}
        for name, value in truncated(self.factors(ctx.task), rank).items():
            factor = torch.zeros(value.shape)
            if A in name:
                nn.init.kaiming_uniform_(factor, a=5**0.5)
            drawn[name] = factor.to(value)
        weights = down["weights"] | drawn
        return super().start(ctx, client, down | {"weights": weights})

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = super().finish(ctx, work, client, down, data)
        up["weights"] = without(up["weights"], self._bases(ctx.task))
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        shares = [self.weight(ctx, reply.examples) for reply in replies.each]
        total = sum(shares)
        stack = []
        for share, reply in zip(shares, replies.each, strict=True):
            stack.append((share / total, reply.up["factors"]))
        merged = self._merged(ctx, server["weights"], stack)
        return server | {"weights": merged | replies.mean["weights"]}

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return (N + 1) Σ_i F_i + 2 · N · S for N clients with F_i bytes of factors and S of other parameters."""
        factors = self.factors(ctx.task)
        of_factors = 0
        for client in ctx.cohort:
            own = truncated(factors, self.rank(ctx, client))
            of_factors += numel(own)
        parameters = only(ctx.task.initial_weights(), ctx.task.parameters)
        others = without(parameters, {*factors, *self._bases(ctx.task)})
        n = len(ctx.cohort)
        return 4.0 * ((n + 1) * of_factors + 2 * n * numel(others))

    def global_model(self, ctx: Context, server: State) -> Any:
        model = super().global_model(ctx, server)
        if model is None:
            return None
        return model | self._none(ctx.task)

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return super().downloaded_model(ctx, client, down) | self._none(ctx.task)

    def _none(self, task: Task) -> Weights:
        """Return factors with the product 0."""
        factors = self.factors(task)
        for names in factor_names(task).values():
            factors[names.b] = torch.zeros_like(factors[names.b])
        return factors

    def _bases(self, task: Task) -> list[str]:
        return [f"{name}.base_layer.weight" for name in factor_names(task)]

    def _merged(self, ctx: Context, weights: Weights, stack: Sequence[tuple[float, Weights]]) -> Weights:
        """Return `weights` with the product of the stacked factors added to W in every layer."""
        merged = dict(weights)
        for name, (a, b) in factor_names(ctx.task).items():
            layer: Any = ctx.task.model.module.get_submodule(name)
            stacked_a = torch.cat([share * factors[a] for share, factors in stack])
            stacked_b = torch.cat([factors[b] for _, factors in stack], 1)
            product = stacked_b @ stacked_a
            if getattr(layer, "fan_in_fan_out", False):
                product = product.T
            adapter = a.split(".")[-2]
            base = f"{name}.base_layer.weight"
            merged[base] = weights[base] + layer.scaling[adapter] * product
        return merged


@dataclass(frozen=True, kw_only=True)
class HetLoRA(OfRanks):
    name = "het_lora"
    reference = "Cho et al. 2024 (HetLoRA), Alg. 1"

    gamma: float = option(0.99, above=0, high=1, help="share of the rank that is left after pruning; 1: do not prune")
    lam: float = option(0.005, low=0, help="weight λ of the term that makes the last ranks small")

    @property
    def differ(self) -> bool:
        return self.gamma < 1 or super().differ

    def init(self, ctx: Context) -> State:
        ranks = [self.rank(ctx, client) for client in range(ctx.task.num_clients)]
        server = super().init(ctx)
        server["factors"] = self.factors(ctx.task)
        server["ranks"] = torch.tensor(ranks)
        return server

    def unicast(self, ctx: Context, server: State) -> State:
        rank = self.rank(ctx, ctx.client)
        if not ctx.unseen:
            rank = int(server["ranks"][ctx.client])
        return {"factors": truncated(server["factors"], rank)}

    def start(self, ctx: Context, client: State, down: State) -> State:
        weights = down["weights"] | down["factors"]
        return super().start(ctx, client, down | {"weights": weights})

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        if self.gamma < 1:
            loss = loss + self.lam * self._last(ctx.task, weights)
        return loss, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = super().finish(ctx, work, client, down, data)
        factors = up["factors"]
        if self.gamma < 1:
            before = self._last(ctx.task, down["factors"])
            after = self._last(ctx.task, factors)
            if after < before:
                up["factors"] = truncated(factors, self._kept(factors))
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        factors = dict(server["factors"])
        sent = [reply.up["factors"] for reply in replies.each]
        for a, b in factor_names(ctx.task).values():
            products = [each[b] @ each[a] for each in sent]
            norms = torch.stack([product.norm() for product in products])
            shares = torch.full_like(norms, 1 / len(norms))
            if norms.sum() > 0:
                shares = norms / norms.sum()
            for name in (a, b):
                values = [filled(each[name], factors[name]) for each in sent]
                factors[name] = torch.tensordot(shares, torch.stack(values), 1)
        ranks = server["ranks"].clone()
        for reply in replies.each:
            ranks[reply.client] = own_rank(reply.up["factors"])
        return super().aggregate(ctx, server, replies) | {"factors": factors, "ranks": ranks}

    def global_model(self, ctx: Context, server: State) -> Any:
        model = super().global_model(ctx, server)
        if model is None:
            return None
        return model | server["factors"]

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        model = super().downloaded_model(ctx, client, down)
        for name, full in self.factors(ctx.task).items():
            model[name] = filled(down["factors"][name], full)
        return model

    def _kept(self, factors: Weights) -> int:
        """Return k, at least 1."""
        return max(1, int(self.gamma * own_rank(factors)))

    def _last(self, task: Task, factors: Weights) -> Tensor:
        """Return Σ_layers ‖B[:, k:]‖ ‖A[k:]‖."""
        k = self._kept(factors)
        total = torch.zeros(())
        for a, b in factor_names(task).values():
            last_columns = factors[b][:, k:]
            last_rows = factors[a][k:]
            total = total + last_columns.norm() * last_rows.norm()
        return total
