"""HarmoFL: Jiang, Wang and Dou 2022, "HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on
Heterogeneous Medical Images", Eq. 2 to 7, Alg. 1.

    setup:   every client sends the mean amplitude |FFT(x)| of its images; their mean Ā goes to everyone, once
    input:   x̃ = Re FFT⁻¹(Ā · e^{i·phase of x}), per channel, in training and in scoring
    client:  δ = α ∇f(θ)/‖∇f(θ)‖;  θ ← θ − η ∇f(θ + δ) on the same batch, with the optimiser's momentum
    server:  unweighted mean of models

A client's mean is a running one over its batches, A ← (1−m)·A + m·batch mean from the first batch on. The released
code swaps the lowest frequency alone, truncates m to 0, and takes A while it trains round 1; here Ā is complete before
round 1 and then frozen. The running statistics of batch norm are those of the pass at θ.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.amplitude_normalisation import AMPLITUDE, Harmonised, amplitude
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, only, scale


@dataclass(frozen=True, kw_only=True)
class HarmoFL(FedAvg):
    """Sends its mean amplitude once and its model each round; keeps the common amplitude. Scored is the server's model
    on harmonised images."""

    name: ClassVar[str] = "harmofl"
    reference: ClassVar[str] = "Jiang, Wang and Dou 2022, Alg. 1"

    alpha: float = option(0.05, low=0, help="α_h, length of the step to where the gradient is taken; 0: plain SGD")
    amplitude_momentum: float = option(0.1, above=0, high=1, help="m of a client's running mean amplitude")
    uniform: bool = option(True, help="average with equal weights, and not by training examples")

    def check(self, problem: ProblemSpec) -> None:
        if problem.tokens or len(problem.shape) != 3:
            found = "tokens" if problem.tokens else "samples of " + "x".join(map(str, problem.shape))
            raise UsageError(f"algorithm.name={self.name}: takes images (channels x height x width), got {found}")
        if not problem.task.feature_shape:
            raise UsageError(f"algorithm.name={self.name}: the model needs a split point, features(x) and a head")

    def adapt(self, ctx: Context) -> Context:
        if not ctx.task.feature_shape:
            return ctx  # refused in `check`
        return ctx.at(task=ctx.task.with_model(Harmonised(ctx.task.model.module), personal_names=[AMPLITUDE]))

    def init(self, ctx: Context) -> State:
        return super().init(ctx) | {"amplitude": ctx.task.initial_weights()[AMPLITUDE]}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return CollectAmplitudes(self), SendAmplitude()

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            value, output = self.loss(ctx, weights | trained, work, down, batch)
            return value, output.buffers

        here = only(weights, self.trained(ctx))
        grads, loss, buffers = gradients(objective, here)
        if self.alpha:
            norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
            there = add(here, scale(grads, self.alpha / (norm + 1e-12)))
            grads, _, _ = gradients(objective, there)
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}

    def weight(self, ctx: Context, examples: int) -> float:
        return 1.0 if self.uniform else super().weight(ctx, examples)

    def global_model(self, ctx: Context, server: State) -> Any:
        task = copy.copy(ctx.task)
        task.personal_names -= {AMPLITUDE}
        weights = super().global_model(ctx.at(task=task), server)
        return None if weights is None else weights | {AMPLITUDE: server["amplitude"]}


@dataclass(frozen=True)
class CollectAmplitudes(Exchange):
    """Setup: the server averages the clients' running mean amplitudes."""

    averaged = ("amplitude",)

    method: HarmoFL

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        means = [amplitude(batch.x) for batch in data.train.batches(ctx.batch_size)]
        running = means[0]
        for mean in means[1:]:
            running = torch.lerp(running, mean, self.method.amplitude_momentum)
        return client, {"amplitude": running}

    def weight(self, ctx: Context, examples: int) -> float:
        return self.method.weight(ctx, examples)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"amplitude": replies.mean["amplitude"]}


class SendAmplitude(Exchange):
    """Setup: every client receives the common amplitude and keeps it."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"amplitude": server["amplitude"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"weights": client["weights"] | {AMPLITUDE: down["amplitude"]}}, {}
