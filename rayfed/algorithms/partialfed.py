"""PartialFed: Sun et al. 2021, "PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization".

    client:  at the start of a round loads each layer either from the server or from its own model of its last round,
             then trains all of it and sends all of it
    server:  FedAvg of everything

`fix`: batch norm and the head are never loaded. `adaptive`: each layer has a logit s of its own, which never leaves;
the layer is loaded with probability σ(s), drawn at the start of the round. Batches alternate: one trains the weights,
the next s, by the cross-entropy of the two copies of the round's start mixed layer by layer,

    w = a·w_global + (1−a)·w_own,  a = 1[σ((s + logistic noise)/τ) > ½], with the gradient of the σ (straight through),

which is Gumbel-softmax for two choices. There is no released code; the rate, the temperature and alternation by batch
are ours. For scoring, a layer is loaded where s ≥ 0.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, State
from rayfed.algorithms.common.layers import layers, mixed
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, detach, only


@dataclass(frozen=True, kw_only=True)
class PartialFed(FedAvg):
    """Sends the whole model; keeps its own copy of what it may not load, and the loading logits. Scored is the mixture
    of the two copies with which a round would start."""

    name: ClassVar[str] = "partialfed"
    reference: ClassVar[str] = "Sun et al. 2021 (PartialFed)"
    default_eval_point: ClassVar[str] = "downloaded"

    variant: str = option("fix", choices=("fix", "adaptive"), help="what is loaded: a fixed part, or what is learnt")
    policy_lr: float = option(0.1, above=0, help="adaptive: learning rate of the logits")
    temperature: float = option(1.0, above=0, help="adaptive: τ of the Gumbel-softmax")

    def check(self, problem: ProblemSpec) -> None:
        if self.variant == "fix" and not self.unloaded(problem.task):
            raise UsageError("algorithm.variant=fix: the model has neither batch norm nor a head that could stay local")

    def unloaded(self, task: Task) -> frozenset[str]:
        """Names of what `fix` never loads."""
        return (task.batch_norm_names | task.head_names) - task.personal_names

    def join(self, ctx: Context) -> State:
        task, state = ctx.task, super().join(ctx)
        if self.variant == "fix":
            return state | {"own": only(task.initial_weights(), self.unloaded(task))}
        where = layers(task)
        logits = torch.zeros(max(where.values()) + 1, device=task.device)
        return state | {"own": only(task.initial_weights(), where), "logits": logits}

    def loaded(self, ctx: Context, client: State, down: State, load: Tensor | None) -> Weights:
        """The weights that a round starts with."""
        own = client["own"]
        if load is not None:
            own = mixed(down["weights"], own, load, layers(ctx.task))
        return down["weights"] | own | client["weights"]

    def start(self, ctx: Context, client: State, down: State) -> State:
        work, load = super().start(ctx, client, down), None
        if self.variant == "adaptive":
            load = (torch.rand_like(client["logits"]) < client["logits"].sigmoid()).float()
            work |= {"own": client["own"], "logits": client["logits"]}
        return work | {"weights": self.loaded(ctx, client, down, load)}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        if self.variant == "fix" or ctx.step % 2 == 0:
            return super().step(ctx, work, down, batch)
        where, personal = layers(ctx.task), only(work["weights"], ctx.task.personal_names)
        u = torch.rand_like(work["logits"]).clamp(1e-6, 1 - 1e-6)
        noise = u.log() - (-u).log1p()

        def objective(policy: Weights) -> tuple[Tensor, Weights]:
            soft = ((policy["logits"] + noise) / self.temperature).sigmoid()
            load = (soft > 0.5).float() + soft - soft.detach()
            weights = mixed(down["weights"], work["own"], load, where) | personal
            weights |= detach(only(weights, ctx.task.model.buffers))  # batch norm notes its statistics in place
            return self.loss(ctx, weights, work, down, batch)[0], {}

        grads, loss, _ = gradients(objective, {"logits": work["logits"]})
        return work | {"logits": work["logits"] - self.policy_lr * grads["logits"]}, {"policy_loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept | {"own": only(work["weights"], client["own"])} | only(work, ("logits",)), up

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        load = (client["logits"] >= 0).float() if self.variant == "adaptive" else None
        return self.loaded(ctx, client, down, load)
