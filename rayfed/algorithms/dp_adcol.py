"""ADCOL with a private discriminator, for a trusted server: Li, He and Song 2023, section on privacy, table 16.

The server receives representations as they are, and protects what it sends: it trains the discriminator by DP-SGD.

    step:    draw each representation with probability q, clip its gradient to an L2 norm of C, add noise σC to the sum
    round:   server_epochs · ⌈1/q⌉ steps, with q = server_batch_size / n fixed by the n representations of round 1

σ is the least noise multiplier for which the steps of all rounds together satisfy (ε, δ), by Rényi accounting. The
privacy spent, as recorded, is the ε at δ of the steps so far. Neighbouring pools differ in one `representation`, which
is in the pool of every round or of none. C, σ and the batch size are our choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Privacy, ProblemSpec, State
from rayfed.algorithms.adcol import Adcol
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights
from rayfed.privacy import SIMULATION_NOTE, large_delta_note
from rayfed.privacy.gaussian import check_budget, epsilon_spent, noise_multiplier, train_privately

RECORDS_NOTE = (
    "a representation depends on other records through the network, so training data have no record-level privacy"
)


def refuse_shared_predictor(algorithm: Adcol) -> None:
    """Raise UsageError if the head is averaged, as its weights would be sent without protection."""
    if algorithm.share_predictor:
        raise UsageError(
            f"algorithm.share_predictor=true: sends weights that {algorithm.name} does not protect; use "
            "share_predictor=false"
        )


@dataclass(frozen=True, kw_only=True)
class DPAdcol(Adcol):
    name: ClassVar[str] = "dp_adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, differential privacy, table 16"
    depends_on_rounds: ClassVar[bool] = True

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together")
    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    clip: float = option(1.0, above=0, help="C, bound of the L2 norm of the gradient of one representation")
    hidden: list[int] = option([512], low=1, high=65536, help="widths of the discriminator's hidden layers")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_shared_predictor(self)
        if self.network != "mlp":
            raise UsageError(
                f"algorithm.network={self.network}: batch norm mixes examples, which DP-SGD does not allow; use "
                "network=mlp"
            )
        fewest = sum(sorted(self.upload_sizes(problem))[: problem.cohort])
        if self.server_batch_size > fewest:
            raise UsageError(
                f"algorithm.server_batch_size={self.server_batch_size}: DP-SGD draws its batches from the "
                f"representations of a round, which may be only {fewest}; use at most {fewest}"
            )
        check_budget(self.epsilon, self.delta, self.steps_per_round(self.server_batch_size / fewest) * problem.rounds)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        return (
            f"ε={self.epsilon:g} at δ={self.delta:g} protects what the server sends; uploads are not protected",
            *large_delta_note(self.delta, sum(self.upload_sizes(problem)), "representations"),
            RECORDS_NOTE,
            SIMULATION_NOTE,
            *super().notes(ctx, problem),
        )

    def init(self, ctx: Context) -> State:
        zero = torch.zeros((), dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | {"accounting": {name: zero.clone() for name in ("sigma", "rate", "steps")}}

    def steps_per_round(self, rate: float) -> int:
        """Return the steps of DP-SGD in a round, at a sampling rate q of `rate`."""
        return self.epochs_per_round * math.ceil(1 / rate - 1e-9)

    def train_discriminator(self, ctx: Context, server: State, weights: Weights, z: Tensor, labels: Tensor) -> State:
        earlier = {name: float(value) for name, value in server["accounting"].items()}
        rate = earlier["rate"] or min(1.0, self.server_batch_size / len(z))
        steps = self.steps_per_round(rate)
        sigma = earlier["sigma"] or noise_multiplier(self.epsilon, self.delta, rate=rate, steps=steps * ctx.rounds)
        outputs = len(ctx.cohort) if self.fixed_size else ctx.task.num_clients
        trained = train_privately(
            self.build_discriminator(ctx.task, outputs).to(ctx.task.device),
            weights,
            z,
            labels,
            optimizer=self.server_optimizer(ctx),
            rate=rate,
            steps=steps,
            sigma=sigma,
            clip=self.clip,
        )
        values = {"sigma": sigma, "rate": rate, "steps": earlier["steps"] + steps}
        accounting = {name: torch.full_like(server["accounting"][name], value) for name, value in values.items()}
        return {"discriminator": trained, "accounting": accounting}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        values = {name: float(value) for name, value in server["accounting"].items()}
        epsilon = epsilon_spent(values["sigma"], self.delta, rate=values["rate"], steps=round(values["steps"]))
        return Privacy(epsilon, "representation")
