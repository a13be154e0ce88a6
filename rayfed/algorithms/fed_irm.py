"""Fed-IRM: the penalty IRMv1 of Arjovsky et al. 2019, "Invariant Risk Minimization", in the clients' losses. De Luca et
al. 2022 (Gen-AFL) have it in Alg. 3.

    client:  min over θ of [f_i(θ) + β g_i²] / max(β, 1),  g_i = ∂ f_i(w · logits)/∂w at w = 1
    server:  FedAvg

With cross-entropy, g_i is the mean of ⟨softmax(o), o⟩ − o_y. Alg. 3 squares the g_i of the batch, which is too large in
expectation; DomainBed multiplies the g_i of two half batches. The authors' code squares the gradient of f_i with
respect to the last layer's weights instead (`penalty=weights`). The weight β is `beta_start` for the first `anneal`
updates and then `beta`, with a fresh optimiser. This change is DomainBed's, and the division by β is that of the
authors' code; Alg. 3 prints neither.
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
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, tree_map


def slope(task: Task, logits: Tensor, y: Tensor, weights: Weights) -> Tensor:
    """Return ∂ loss(w · logits, y)/∂w at w = 1, a scalar that can be differentiated again."""

    def scaled(w: Weights) -> tuple[Tensor, Weights]:
        return task.loss(w["w"] * logits, y, weights), {}

    one = torch.ones((), device=logits.device, dtype=logits.dtype)
    grads, _, _ = gradients(scaled, {"w": one}, create_graph=True)
    return grads["w"]


def last_layer(task: Task) -> str | None:
    """Return the name of the weights of the head's last linear layer, if there is one."""
    weights = task.initial_weights()
    last = None
    for name in task.trainable:
        if name in task.head_names and weights[name].dim() == 2:
            last = name
    return last


def last_layer_gradient(task: Task, weights: Weights, features: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the loss with respect to the last layer's weights; it can be differentiated again."""
    name = last_layer(task)
    assert name is not None  # `check_penalty` refuses it

    def loss(trained: Weights) -> tuple[Tensor, Weights]:
        logits = task.head(weights | trained, features)
        return task.loss(logits, y, weights), {}

    grads, _, _ = gradients(loss, {name: weights[name]}, create_graph=True)
    return grads[name]


def penalty_option() -> Any:
    """Declare the option of a method with this penalty."""
    return option(
        "scale",
        choices=("scale", "weights"),
        help="the squared gradient: by the logits' scale, or the last layer's weights",
    )


def check_penalty(problem: ProblemSpec, penalty: str) -> None:
    """Raise UsageError if the penalty needs a layer that the model does not have."""
    if penalty == "weights" and last_layer(problem.task) is None:
        raise UsageError("algorithm.penalty=weights: the model's head has no linear layer; use algorithm.penalty=scale")


def penalised_loss(
    task: Task, penalty: str, beta: Tensor | float, loss: Tensor, weights: Weights, output: Output, y: Tensor
) -> Tensor:
    """Return [loss + β ‖g‖²] / max(β, 1), g being `slope` with the penalty "scale", else `last_layer_gradient`."""
    if not isinstance(beta, Tensor):
        beta = torch.full((), beta, device=loss.device, dtype=loss.dtype)  # filled there: a copy would wait for the GPU
    if penalty == "scale":
        g = slope(task, output.logits, y, weights)
    else:
        g = last_layer_gradient(task, weights, output.features, y)
    loss = loss + beta * g.square().sum()
    return loss / beta.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class FedIRM(FedAvg):
    name = "fed_irm"
    reference = "Arjovsky et al. 2019, IRMv1; de Luca et al. 2022, Alg. 3"
    traits = replace(FedAvg.traits, needs_split=True)

    beta: float = option(100.0, low=0, help="β, weight of the penalty after `anneal` updates; 0 is FedAvg then")
    beta_start: float = option(1.0, low=0, help="β in the first updates")
    anneal: int = option(500, low=0, help="updates of a client before β changes")
    penalty: str = penalty_option()

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_penalty(problem, self.penalty)

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        client["updates"] = torch.zeros((), dtype=torch.long, device=ctx.task.device)
        return client

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work["updates"] = client["updates"]
        return work

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        is_early = work["updates"] < self.anneal
        beta = torch.where(is_early, self.beta_start, self.beta)
        loss = penalised_loss(ctx.task, self.penalty, beta, loss, weights, output, batch.y)
        return loss, output

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        updates = work["updates"]
        restarts = updates == self.anneal

        def restarted(moment: Tensor) -> Tensor:
            return torch.where(restarts, torch.zeros_like(moment), moment)

        moments = tree_map(restarted, work["optimizer"])
        work = work | {"optimizer": moments}
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"updates": updates + 1}, metrics

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept["updates"] = work["updates"]
        return kept, up
