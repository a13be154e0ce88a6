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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, ProblemSpec, Replies, State, Traits
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.modules import copied
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only, without


def factor_names(task: Task) -> dict[str, tuple[str, str]]:
    """Return the names of the trained factors A and B by the name of their layer."""
    pairs = ((name, name.replace(".lora_A.", ".lora_B.")) for name in task.trainable if ".lora_A." in name)
    return {a.partition(".lora_A.")[0]: (a, b) for a, b in pairs if b in task.trainable}


def truncated(factors: Weights, rank: int) -> Weights:
    """Return the first rows of each A and the first columns of each B."""
    return {name: (v[:rank] if ".lora_A." in name else v[:, :rank]).clone() for name, v in factors.items()}


def filled(factors: Weights, full: Weights) -> Weights:
    """Return `factors` with rows and columns of zeros in the shapes of `full`."""
    return {
        name: F.pad(value, (0, full[name].shape[1] - value.shape[1], 0, full[name].shape[0] - value.shape[0]))
        for name, value in factors.items()
    }


def own_rank(factors: Weights) -> int:
    """Return the rank of a client's factors; 0 without any."""
    return max((len(value) for name, value in factors.items() if ".lora_A." in name), default=0)


@dataclass(frozen=True, kw_only=True)
class OfRanks(FedAvg):
    """FedAvg of all weights but the factors, which are the field `factors`."""

    traits: ClassVar[Traits] = replace(FedAvg.traits, assumes_uniform_sampling=True, keeps_optimizer=None)

    ranks: list[int] | None = option(
        None, low=1, help="ranks of the clients in turn, at most that of the model, which null gives to all"
    )

    def check(self, problem: ProblemSpec) -> None:
        where, pairs = f"algorithm.name={self.name}", factor_names(problem.task)
        initial, task = problem.task.initial_weights(), problem.task
        names = {name for pair in pairs.values() for name in pair if initial[name].ndim == 2} - task.personal_names
        others = [name for name in task.trainable if "lora_" in name and name not in names]
        if not pairs or others:
            found = others[0] if others else "no LoRA"
            raise UsageError(
                f"{where}: needs both factors A and B of linear layers trained and sent, as model.name=huggingface has "
                f"them with model.lora and without algorithm.personal; finds {found}"
            )
        least = min(len(initial[a]) for a, _ in pairs.values())
        if self.ranks and max(self.ranks) > least:
            raise UsageError(f"algorithm.ranks={self.ranks}: the model's LoRA has rank {least}, the most of a client")
        if problem.vmap_clients > 1 and self.differ:
            raise UsageError(f"placement.vmap_clients={problem.vmap_clients}: clients of {where} differ in rank; use 1")

    @property
    def differ(self) -> bool:
        """Whether clients may have different ranks."""
        return len(set(self.ranks or ())) > 1

    def factors(self, task: Task) -> Weights:
        """Return the initial factors."""
        names = [name for pair in factor_names(task).values() for name in pair]
        return {name: task.initial_weights()[name] for name in names}

    def rank(self, ctx: Context, client: int) -> int:
        """Return the rank that a client has at first."""
        return self.ranks[client % len(self.ranks)] if self.ranks else own_rank(self.factors(ctx.task))

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        return server | {"weights": without(server["weights"], self.factors(ctx.task))}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        names = self.factors(ctx.task)
        return client, {"weights": without(up["weights"], names), "factors": only(up["weights"], names)}


@dataclass(frozen=True, kw_only=True)
class FLoRA(OfRanks):
    name: ClassVar[str] = "flora"
    reference: ClassVar[str] = "Wang et al. 2024 (FLoRA), Alg. 1"

    def adapt(self, ctx: Context) -> Context:
        model: Any = copied(ctx.task.model.module, {id(value): value for value in ctx.task.model.module.parameters()})
        for layer in self._layers(model, ctx.task):
            weight: nn.Parameter = layer.base_layer._parameters.pop("weight")  # the state has it as a buffer
            layer.base_layer.register_buffer("weight", weight.detach())
        return ctx.at(task=ctx.task.with_model(model))

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        return server | {"weights": self._merged(ctx, server["weights"], [(1.0, self.factors(ctx.task))])}

    def start(self, ctx: Context, client: State, down: State) -> State:
        rank, drawn = self.rank(ctx, ctx.client), {}
        for name, value in truncated(self.factors(ctx.task), rank).items():
            cpu = torch.zeros(value.shape)
            drawn[name] = (nn.init.kaiming_uniform_(cpu, a=5**0.5) if ".lora_A." in name else cpu).to(value)
        return super().start(ctx, client, down | {"weights": down["weights"] | drawn})

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        return client, up | {"weights": without(up["weights"], self._bases(ctx.task))}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        shares = [self.weight(ctx, reply.examples) for reply in replies.each]
        factors = [(n / sum(shares), reply.up["factors"]) for n, reply in zip(shares, replies.each, strict=True)]
        return server | {"weights": self._merged(ctx, server["weights"], factors) | replies.mean["weights"]}

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return (N + 1) Σ_i F_i + 2 · N · S for N clients with F_i bytes of factors and S of other parameters."""
        factors = self.factors(ctx.task)
        sizes = [sum(v.numel() for v in truncated(factors, self.rank(ctx, i)).values()) for i in ctx.cohort]
        others = without(ctx.task.initial_weights(), {*factors, *self._bases(ctx.task)})
        sent = sum(others[name].numel() for name in ctx.task.parameters if name in others)
        return 4.0 * ((len(sizes) + 1) * sum(sizes) + 2 * len(sizes) * sent)

    def global_model(self, ctx: Context, server: State) -> Any:
        model = super().global_model(ctx, server)
        return None if model is None else model | self._none(ctx.task)

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return super().downloaded_model(ctx, client, down) | self._none(ctx.task)

    def _none(self, task: Task) -> Weights:
        """Return factors whose product is 0."""
        return {n: torch.zeros_like(v) if ".lora_B." in n else v for n, v in self.factors(task).items()}

    def _layers(self, model: nn.Module, task: Task) -> list[Any]:
        return [model.get_submodule(name) for name in factor_names(task)]

    def _bases(self, task: Task) -> list[str]:
        return [f"{name}.base_layer.weight" for name in factor_names(task)]

    def _merged(self, ctx: Context, weights: Weights, stack: Sequence[tuple[float, Weights]]) -> Weights:
        """Return `weights` with the product of the stacked factors added to W in every layer."""
        merged = dict(weights)
        for name, (a, b) in factor_names(ctx.task).items():
            layer: Any = ctx.task.model.module.get_submodule(name)
            rows = torch.cat([share * factors[a] for share, factors in stack])
            product = torch.cat([factors[b] for _, factors in stack], 1) @ rows
            product = product.T if getattr(layer, "fan_in_fan_out", False) else product
            base = f"{name}.base_layer.weight"
            merged[base] = weights[base] + layer.scaling[a.split(".")[-2]] * product
        return merged


@dataclass(frozen=True, kw_only=True)
class HetLoRA(OfRanks):
    name: ClassVar[str] = "het_lora"
    reference: ClassVar[str] = "Cho et al. 2024 (HetLoRA), Alg. 1"

    gamma: float = option(0.99, above=0, high=1, help="share of the rank that is left after pruning; 1: do not prune")
    lam: float = option(0.005, low=0, help="weight λ of the term that makes the last ranks small")

    @property
    def differ(self) -> bool:
        return self.gamma < 1 or super().differ

    def init(self, ctx: Context) -> State:
        ranks = torch.tensor([self.rank(ctx, client) for client in range(ctx.task.num_clients)])
        return super().init(ctx) | {"factors": self.factors(ctx.task), "ranks": ranks}

    def unicast(self, ctx: Context, server: State) -> State:
        rank = self.rank(ctx, ctx.client) if ctx.unseen else int(server["ranks"][ctx.client])
        return {"factors": truncated(server["factors"], rank)}

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(ctx, client, down | {"weights": down["weights"] | down["factors"]})

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        value, output = super().loss(ctx, weights, work, down, batch)
        return (value + self.lam * self._last(ctx.task, weights) if self.gamma < 1 else value), output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        if self.gamma < 1 and self._last(ctx.task, up["factors"]) < self._last(ctx.task, down["factors"]):
            up = up | {"factors": truncated(up["factors"], self._kept(ctx.task, up["factors"]))}
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        factors, ranks = dict(server["factors"]), server["ranks"].clone()
        for a, b in factor_names(ctx.task).values():
            norms = torch.stack([(reply.up["factors"][b] @ reply.up["factors"][a]).norm() for reply in replies.each])
            shares = norms / norms.sum() if norms.sum() > 0 else torch.full_like(norms, 1 / len(norms))
            for name in (a, b):
                values = [filled({name: reply.up["factors"][name]}, factors)[name] for reply in replies.each]
                factors[name] = torch.tensordot(shares, torch.stack(values), 1)
        for reply in replies.each:
            ranks[reply.client] = own_rank(reply.up["factors"])
        return super().aggregate(ctx, server, replies) | {"factors": factors, "ranks": ranks}

    def global_model(self, ctx: Context, server: State) -> Any:
        model = super().global_model(ctx, server)
        return None if model is None else model | server["factors"]

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return super().downloaded_model(ctx, client, down) | filled(down["factors"], self.factors(ctx.task))

    def _kept(self, task: Task, factors: Weights) -> int:
        """Return k, at least 1."""
        return max(1, int(self.gamma * own_rank(factors)))

    def _last(self, task: Task, factors: Weights) -> Tensor:
        """Return Σ_layers ‖B[:, k:]‖ ‖A[k:]‖."""
        k, pairs = self._kept(task, factors), factor_names(task).values()
        return sum((factors[b][:, k:].norm() * factors[a][k:].norm() for a, b in pairs), torch.zeros(()))
