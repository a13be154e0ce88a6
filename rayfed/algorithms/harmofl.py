"""HarmoFL: Jiang, Wang and Dou 2022, "HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on
Heterogeneous Medical Images", Eq. 2 to 7, Alg. 1.

    setup:   every client sends the mean amplitude |FFT(x)| of its images; the server sends their mean Ā to all, once
    input:   x̃ = Re FFT⁻¹(Ā · e^{i·phase of x}), per channel, in training and in evaluation
    client:  δ = α ∇f(θ)/‖∇f(θ)‖;  θ ← θ − η ∇f(θ + δ) on the same batch, with the optimiser's momentum
    server:  unweighted mean of models

A client's mean is a running mean over its batches: A is the mean of the first batch, then A ← (1−m)·A + m·batch mean. Ā
is complete before round 1 and then frozen. The running statistics of batch norm come from the forward pass at θ.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithm import (
    ClientData,
    Context,
    Exchange,
    Finished,
    HandOut,
    ProblemSpec,
    Replies,
    State,
    Stepped,
)
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.common.networks import WrappedModel
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import add, norm, only, scale

AMPLITUDE = "harmofl.amplitude"
"""The name of the buffer that holds Ā."""


@dataclass(frozen=True, kw_only=True)
class HarmoFL(FedAvg):
    """The global model is scored on images with normalised amplitudes."""

    name = "harmofl"
    reference = "Jiang, Wang and Dou 2022, Alg. 1"
    traits = replace(FedAvg.traits, computes_with_inputs=True)

    alpha: float = option(0.05, low=0, help="α, distance from θ; 0: plain SGD")
    amplitude_momentum: float = option(0.1, above=0, high=1, help="m, momentum of the running mean amplitude")
    weighting: str = weighting_option("equal")

    def check(self, problem: ProblemSpec) -> None:
        if problem.tokens or len(problem.shape) != 3:
            actual = "inputs of shape " + "x".join(map(str, problem.shape))
            if problem.tokens:
                actual = "tokens"
            raise UsageError(f"algorithm.name={self.name}: needs images (channels x height x width), got {actual}")

    def adapt(self, ctx: Context) -> Context:
        model = AmplitudeNormalised(ctx.task.model.module)
        return ctx.at(task=ctx.task.with_model(model, personal_names=[AMPLITUDE]))

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["amplitude"] = ctx.task.initial_weights()[AMPLITUDE]
        return server

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return CollectAmplitudes(self), HandOut(("amplitude",), AMPLITUDE)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        weights = work["weights"]
        theta = only(weights, self.trained(ctx))
        grads, loss, buffers = self.loss_gradients(ctx, theta, work, down, batch)
        if self.alpha:
            delta = scale(grads, self.alpha / (norm(grads) + 1e-12))
            point = add(theta, delta)
            grads, _, _ = self.loss_gradients(ctx, point, work, down, batch)
        grads = self.correct(ctx, grads, work, down)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}

    def global_model(self, ctx: Context, server: State) -> Any:
        task = copy.copy(ctx.task)
        task.personal_names -= {AMPLITUDE}
        weights = super().global_model(ctx.at(task=task), server)
        if weights is None:
            return None
        return weights | {AMPLITUDE: server["amplitude"]}


@dataclass(frozen=True)
class CollectAmplitudes(Exchange):
    """Setup: the server averages the clients' running mean amplitudes."""

    averaged = ("amplitude",)

    method: HarmoFL

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        means = [mean_amplitude(batch.x) for batch in data.train.batches(ctx.batch_size)]
        running = means[0]
        for mean in means[1:]:
            running = torch.lerp(running, mean, self.method.amplitude_momentum)
        return client, {"amplitude": running}

    def weight(self, ctx: Context, examples: int) -> float:
        return self.method.weight(ctx, examples)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"amplitude": replies.mean["amplitude"]}


# Amplitude normalisation


def mean_amplitude(x: Tensor) -> Tensor:
    """Return the mean over a batch [batch, channels, height, width] of the amplitudes of the two-dimensional FFT."""
    return torch.fft.fft2(x).abs().mean(0)


def normalise_amplitude(x: Tensor, amplitude: Tensor) -> Tensor:
    """Return images with the phases of `x` and the given amplitudes [channels, height, width].

    An empty `amplitude`, as before the setup, leaves `x` unchanged.
    """
    if not amplitude.numel():
        return x
    phase = torch.fft.fft2(x).angle()
    frequencies = torch.polar(amplitude.expand_as(x), phase)
    return torch.fft.ifft2(frequencies).real


class AmplitudeNormalised(WrappedModel):
    """A model that normalises the amplitudes of its inputs; the amplitude is an additional buffer."""

    harmofl: Any

    def __init__(self, model: Any):
        extra = nn.Module()
        extra.register_buffer("amplitude", torch.zeros(0))  # its shape is known after the setup
        super().__init__(model, "harmofl", extra)

    def features(self, x: Tensor) -> Tensor:
        x = normalise_amplitude(x, self.harmofl.amplitude)
        return self.model.features(x)

    def forward(self, x: Tensor) -> Any:
        if self.feature_shape:
            return super().forward(x)
        x = normalise_amplitude(x, self.harmofl.amplitude)
        return self.model(x)
