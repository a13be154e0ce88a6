"""FedReg: Xu et al. 2022, "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", as in its
public code.

Two sets of pseudo-data come from a batch (x, y) and the received model θ_t, each by ten steps up the loss:

    x ← x + η_s·sign ∇_x ℓ(θ_t; x, y)   x_s, with labels softmax(θ_t(x_s));  with η_s/100: x_p, with labels y

    client:  θ ← θ − η ∇ℓ(γθ + (1−γ)θ_t; x, y);  then, with g₂ = ∇ℓ(x_s) and g₃ = ∇ℓ(x_p) at ½(θ + θ_t), d = θ − θ_t,
             w = max(0, ⟨d, g₂⟩/‖g₂‖²),  w' = max(0, ⟨d − w g₂, g₃⟩/‖g₃‖²),  θ ← θ − w g₂ − w' g₃
    server:  unweighted mean of models

Since pseudo-data depends on θ_t, x and y only, it is computed in the step that uses the batch, in evaluation mode.
Pseudo-data is not clipped; that code has not clipped it since July 2022. The passes for g₂ and g₃ do not update the
running statistics of batch norm.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State, Stepped
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.common.soft_labels import check_real_inputs
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import gradients, logits_of
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, dot, only, scale, sub

STEPS = 10
"""The number of steps that compute pseudo-data."""


@dataclass(frozen=True, kw_only=True)
class FedReg(FedAvg):
    name = "fedreg"
    reference = "Xu et al. 2022 (FedReg), public code"
    traits = replace(FedAvg.traits, computes_with_inputs=True, requires_classes=True)

    eta_s: float = option(0.1, above=0, help="η_s, step size of the pseudo-data, in units of normalised inputs")
    gamma: float = option(0.5, low=0, high=1, help="γ, share of the current weights")
    weighting: str = weighting_option("equal")

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work["received"] = work["weights"]
        return work

    def pseudo_inputs(self, ctx: Context, weights: Weights, batch: Batch, step_size: float) -> Tensor:
        """Return the batch's inputs after `STEPS` signed gradient steps that increase the loss of `weights`."""

        def loss(inputs: Weights) -> tuple[Tensor, Weights]:
            returned, _ = ctx.task.model(weights, inputs["x"], train=False)
            return ctx.task.scoring_loss(logits_of(returned), batch.y, weights), {}

        x = batch.x
        for _ in range(STEPS):
            grads, _, _ = gradients(loss, {"x": x})
            x = x + step_size * grads["x"].sign()
        return x

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        weights = work["weights"]
        received = work["received"]
        x_s = self.pseudo_inputs(ctx, received, batch, self.eta_s)
        x_p = self.pseudo_inputs(ctx, received, batch, self.eta_s / 100)
        soft_labels = ctx.task.predict(received, x_s).softmax(1)

        names = self.trained(ctx)
        theta = only(weights, names)
        theta_t = only(received, names)
        current = scale(theta, self.gamma)
        point = add(current, theta_t, alpha=1 - self.gamma)
        grads, loss, buffers = self.loss_gradients(ctx, point, work, down, batch)
        grads = self.correct(ctx, grads, work, down)
        ctx.optimizer.update_(weights, grads, work["optimizer"])

        drift = sub(only(weights, names), theta_t)
        middle = add(theta_t, drift, alpha=0.5)
        for pseudo in (Batch(x_s, soft_labels), Batch(x_p, batch.y)):
            slope = self.pseudo_slope(ctx, weights, middle, pseudo)
            length = dot(slope, slope).clamp(min=1e-12)
            factor = dot(drift, slope) / length
            drift = sub(drift, scale(slope, factor.clamp(min=0)))
        theta = add(theta_t, drift)
        return work | {"weights": weights | theta | buffers}, {"loss": loss}

    def pseudo_slope(self, ctx: Context, weights: Weights, point: Weights, pseudo: Batch) -> Weights:
        """Return the gradient of the loss on pseudo-data at the weights `point`; the others are those of `weights`."""

        def loss(trained: Weights) -> tuple[Tensor, Weights]:
            logits = ctx.task.forward(weights | trained, pseudo.x).logits
            return ctx.task.scoring_loss(logits, pseudo.y, weights | trained), {}

        slope, _, _ = gradients(loss, point)
        return slope
