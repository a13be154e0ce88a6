"""FedReg: Xu et al. 2022, "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", as in its
public code.

Two sets of pseudo-data come from a batch (x, y) and the received model θ_t, each by ten steps up the loss:

    x ← x + η_s·sign ∇_x ℓ(θ_t; x, y)   x_s, with labels softmax(θ_t(x_s));  with η_s/100: x_p, with labels y

    client:  θ ← θ − η ∇ℓ(γθ + (1−γ)θ_t; x, y);  then, with g₂ = ∇ℓ(x_s) and g₃ = ∇ℓ(x_p) at ½(θ + θ_t), d = θ − θ_t,
             w = max(0, ⟨d, g₂⟩/‖g₂‖²),  w' = max(0, ⟨d − w g₂, g₃⟩/‖g₃‖²),  θ ← θ − w g₂ − w' g₃
    server:  unweighted mean of models

Since pseudo-data depends on θ_t, x and y only, it is computed in the step that uses the batch, in evaluation mode.
Pseudo-data is not clipped, as in that code since July 2022. The passes for g₂ and g₃ do not update the running
statistics of batch norm.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State, Traits
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.common.soft_labels import check_real_inputs
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import gradients, logits_of
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, only, scale, sub

STEPS = 10
"""The number of steps that compute pseudo-data."""


@dataclass(frozen=True, kw_only=True)
class FedReg(FedAvg):
    name: ClassVar[str] = "fedreg"
    reference: ClassVar[str] = "Xu et al. 2022 (FedReg), public code"
    traits: ClassVar[Traits] = replace(FedAvg.traits, computes_with_inputs=True, requires_classes=True)

    eta_s: float = option(0.1, above=0, help="η_s, step size of the pseudo-data, in units of normalised inputs")
    gamma: float = option(0.5, low=0, high=1, help="γ, share of the current weights")
    weighting: str = weighting_option("equal")

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        return work | {"received": work["weights"]}

    def pseudo_inputs(self, ctx: Context, weights: Weights, batch: Batch, step_size: float) -> Tensor:
        """Return the batch's inputs after `STEPS` signed gradient steps that increase the loss of `weights`."""

        def loss(inputs: Weights) -> tuple[Tensor, Weights]:
            logits = logits_of(ctx.task.model(weights, inputs["x"], train=False)[0])
            return ctx.task.scoring_loss(logits, batch.y, weights), {}

        x = batch.x
        for _ in range(STEPS):
            grads, _, _ = gradients(loss, {"x": x})
            x = x + step_size * grads["x"].sign()
        return x

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights, received, names = work["weights"], work["received"], self.trained(ctx)
        x_s, x_p = (self.pseudo_inputs(ctx, received, batch, size) for size in (self.eta_s, self.eta_s / 100))
        soft_labels = ctx.task.predict(received, x_s).softmax(1)
        theta, theta_t = only(weights, names), only(received, names)
        point = add(scale(theta, self.gamma), theta_t, alpha=1 - self.gamma)
        grads, loss, buffers = self.loss_gradients(ctx, point, work, down, batch)
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])

        drift = sub(only(weights, names), theta_t)
        middle = add(theta_t, drift, alpha=0.5)
        for x, y in ((x_s, soft_labels), (x_p, batch.y)):

            def pseudo_loss(trained: Weights, x: Tensor = x, y: Tensor = y) -> tuple[Tensor, Weights]:
                return ctx.task.scoring_loss(ctx.task.forward(weights | trained, x).logits, y, weights | trained), {}

            slope, _, _ = gradients(pseudo_loss, middle)
            factor = (inner(drift, slope) / inner(slope, slope).clamp(min=1e-12)).clamp(min=0)
            drift = sub(drift, scale(slope, factor))
        return work | {"weights": weights | add(theta_t, drift) | buffers}, {"loss": loss}


def inner(a: Weights, b: Weights) -> Tensor:
    """Return the inner product ⟨a, b⟩ over all weights, a scalar."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()
