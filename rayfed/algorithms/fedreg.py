"""FedReg: Xu et al. 2022, "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", as in its
public code; a baseline of FRAug (table 7).

From a batch (x, y) and the model received, θ_t, two sets of pseudo-data are made, each by ten steps of

    x ← clip(x − η_s·sign ∇_x ℓ(θ_t; x, y))   x_s, with the soft labels softmax(θ_t(x_s));  with η_s/100: x_p, labels y

    client:  θ ← θ − η ∇ℓ(γθ + (1−γ)θ_t; x, y);  then, with g₂ = ∇ℓ(x_s) and g₃ = ∇ℓ(x_p) at ½(θ + θ_t), d = θ − θ_t,
             w = max(0, ⟨d, g₂⟩/‖g₂‖²),  w' = max(0, ⟨d − w g₂, g₃⟩/‖g₃‖²),  θ ← θ − w g₂ − w' g₃
    server:  unweighted mean of models

Pseudo-data depends on θ_t, x and y alone and so may be made when the batch comes up. It is clipped to the range of the
batch, as in that code, and made in evaluation mode; g₂ and g₃ leave the running statistics of batch norm alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, only, scale, sub

STEPS = 10


def inner(a: Weights, b: Weights) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


@dataclass(frozen=True, kw_only=True)
class FedReg(FedAvg):
    """Sends weights and keeps nothing; scored is the server's model."""

    name: ClassVar[str] = "fedreg"
    reference: ClassVar[str] = "Xu et al. 2022 (FedReg), public code"

    eta_s: float = option(0.1, above=0, help="η_s, step of the pseudo-data (in units of normalised inputs)")
    gamma: float = option(0.5, low=0, high=1, help="γ, share of the current weights where the gradient is taken")
    uniform: bool = option(True, help="average with equal weights, and not by training examples")

    def check(self, problem: ProblemSpec) -> None:
        if problem.tokens:
            raise UsageError(f"algorithm.name={self.name}: takes inputs that can be changed a little, got tokens")

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        return work | {"received": work["weights"]}

    def moved(self, ctx: Context, weights: Weights, batch: Batch, size: float) -> Tensor:
        """The batch's inputs after `STEPS` steps of length `size` towards less loss."""

        def loss(inputs: Weights) -> tuple[Tensor, Weights]:
            logits, _ = ctx.task.model(weights, inputs["x"], train=False)
            return ctx.task.loss(logits, batch.y), {}

        x, low, high = batch.x, batch.x.amin(), batch.x.amax()
        for _ in range(STEPS):
            found, _, _ = gradients(loss, {"x": x})
            x = torch.minimum(torch.maximum(x - size * found["x"].sign(), low), high)
        return x

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights, received, names = work["weights"], work["received"], self.trained(ctx)
        soft, hard = (self.moved(ctx, received, batch, size) for size in (self.eta_s, self.eta_s / 100))
        labels = ctx.task.predict(received, soft).softmax(1)

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            value, output = self.loss(ctx, weights | trained, work, down, batch)
            return value, output.buffers

        now, old = only(weights, names), only(received, names)
        grads, loss, buffers = gradients(objective, add(scale(now, self.gamma), old, alpha=1 - self.gamma))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])

        drift = sub(only(weights, names), old)
        middle = add(old, drift, alpha=0.5)
        for x, y in ((soft, labels), (hard, batch.y)):

            def kept(trained: Weights, x: Tensor = x, y: Tensor = y) -> tuple[Tensor, Weights]:
                return ctx.task.loss(ctx.task.forward(weights | trained, x).logits, y), {}

            away, _, _ = gradients(kept, middle)
            factor = (inner(drift, away) / inner(away, away).clamp(min=1e-12)).clamp(min=0)
            drift = sub(drift, scale(away, factor))
        return work | {"weights": weights | add(old, drift) | buffers}, {"loss": loss}

    def weight(self, ctx: Context, examples: int) -> float:
        return 1.0 if self.uniform else super().weight(ctx, examples)
