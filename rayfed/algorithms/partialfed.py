"""PartialFed: Sun et al. 2021, "PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization".

    client:  starts a round with each layer taken either from the server ("loaded") or from its model of its last
             round; trains and sends the whole model
    server:  FedAvg of all weights

`fix`: batch norm and the head are never loaded. `adaptive`: the client has a logit s for each layer, which is never
sent. It loads the layer with probability σ(s), drawn at the start of the round. Batches alternate: one trains the
weights, the next s. The loss for s is that of the layer-wise mixture of the two models from the start of the round,

    w = a·w_global + (1−a)·w_local,  a = 1[σ((s + logistic noise)/τ) > ½], with the gradient of σ (straight-through)

This is Gumbel-softmax for two choices. For scoring, a layer is loaded where s ≥ 0. There is no released code; rate,
temperature and alternation are our choices.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Finished, ProblemSpec, State, Stepped
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, detach, only, without


@dataclass(frozen=True, kw_only=True)
class PartialFed(FedAvg):
    """The mixture with which a round starts is scored."""

    name = "partialfed"
    reference = "Sun et al. 2021 (PartialFed)"
    traits = replace(FedAvg.traits, needs_split=True, default_eval_point="downloaded")

    variant: str = option("fix", choices=("fix", "adaptive"), help="loads fixed layers, or learns which")
    policy_lr: float = option(0.1, above=0, help="adaptive: learning rate of the logits")
    temperature: float = option(1.0, above=0, help="adaptive: τ of the Gumbel-softmax")

    def check(self, problem: ProblemSpec) -> None:
        if self.variant == "fix" and not self.unloaded(problem.task):
            raise UsageError("algorithm.variant=fix: the model has neither batch norm nor a head to keep local")

    def unloaded(self, task: Task) -> frozenset[str]:
        """Return the names of the weights that `fix` never loads."""
        return (task.batch_norm_names | task.head_names) - task.personal_names

    def join(self, ctx: Context) -> State:
        initial = ctx.task.initial_weights()
        client = super().join(ctx)
        if self.variant == "fix":
            client["local"] = only(initial, self.unloaded(ctx.task))
            return client
        positions = layer_positions(ctx.task)
        layers = max(positions.values()) + 1
        client["local"] = only(initial, positions)
        client["logits"] = torch.zeros(layers, device=ctx.task.device)
        return client

    def loaded(self, ctx: Context, client: State, down: State, load: Tensor | None) -> Weights:
        """Return the weights with which a round starts. `load` [layers] is 1 for layers to load; `fix` needs none."""
        local = client["local"]
        if load is not None:
            local = mixture(down["weights"], local, load, layer_positions(ctx.task))
        return down["weights"] | local | client["weights"]

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        load = None
        if self.variant == "adaptive":
            logits = client["logits"]
            load = (torch.rand_like(logits) < logits.sigmoid()).float()
            work["local"] = client["local"]
            work["logits"] = logits
        work["weights"] = self.loaded(ctx, client, down, load)
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        if self.variant == "fix" or ctx.step % 2 == 0:
            return super().step(ctx, work, down, batch)
        return self.learn_policy(ctx, work, down, batch)

    def learn_policy(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        """Take a step of the logits s, by Gumbel-softmax."""
        positions = layer_positions(ctx.task)
        personal = only(work["weights"], ctx.task.personal_names)
        s = work["logits"]
        u = torch.rand_like(s).clamp(1e-6, 1 - 1e-6)
        noise = u.log() - (-u).log1p()

        def objective(policy: Weights) -> tuple[Tensor, Weights]:
            soft = ((policy["logits"] + noise) / self.temperature).sigmoid()
            load = (soft > 0.5).float() + soft - soft.detach()
            weights = mixture(down["weights"], work["local"], load, positions) | personal
            weights |= detach(only(weights, ctx.task.buffers))  # batch norm updates its statistics in place
            loss, _ = self.loss(ctx, weights, work, down, batch)
            return loss, {}

        grads, loss, _ = gradients(objective, {"logits": s})
        s = s - ctx.scaled(self.policy_lr) * grads["logits"]
        return work | {"logits": s}, {"policy_loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept["local"] = only(work["weights"], client["local"])
        if self.variant == "adaptive":
            kept["logits"] = work["logits"]
        return kept, up

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        load = None
        if self.variant == "adaptive":
            load = (client["logits"] >= 0).float()
        return self.loaded(ctx, client, down, load)


def layer_positions(task: Task) -> dict[str, int]:
    """Return the position of its layer for each weight that is sent.

    The weights of a layer share their names up to the last dot.
    """
    positions: dict[str, int] = {}
    order: dict[str, int] = {}
    for name in without(task.initial_weights(), task.personal_names):
        layer, _, _ = name.rpartition(".")
        positions[name] = order.setdefault(layer, len(order))
    return positions


def mixture(common: Weights, local: Weights, load: Tensor, positions: dict[str, int]) -> Weights:
    """Return load·common + (1−load)·local, with `load` [layers] by layer; integer buffers are those of `common`."""
    mixed = only(common, local)
    for name, value in local.items():
        if value.is_floating_point():
            share = load[positions[name]]
            mixed[name] = torch.lerp(value, common[name], share)
    return mixed
