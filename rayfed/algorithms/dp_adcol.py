"""ADCOL with differential privacy: Li, He and Song 2023, for a trusted server (table 16, dp_adcol: DP-SGD trains the
discriminator) and for an honest but curious server (table 17, local_dp_adcol: private uploads).

    dp_adcol:        each step draws each representation with probability q, clips its gradient to an L2 norm of C, and
                     adds noise σC to the sum;  a round has server_epochs · ⌈1/q⌉ steps, with
                     q = server_batch_size / n fixed by the n representations of round 1
    local_dp_adcol:  a client sends z' + Lap(1/ε) on each coordinate, z' being z rescaled to [0, 1]; its divergence sees
                     z';  the server is that of ADCOL

In dp_adcol, the server receives representations as they are, and protects what it sends. σ is the least noise
multiplier for which the steps of all rounds together satisfy (ε, δ), by Rényi accounting. The privacy spent, as
recorded, is the ε at δ of the steps so far. Neighbouring pools differ in one `representation`, which is in the pool of
every round or of none. C, σ and the batch size are our choices.

For local_dp_adcol, the paper's text prints "Gau" and defines "Lap". With guarantee=strict, z' is then scaled to an L1
norm of 1/2, so that ε holds for the vector as a whole. In each round a client sends a share of its representations
(`sampling`). It draws records without replacement across rounds and starts again when all were sent once: to spend ε
only once, as the paper does, `sampling` must be at most one over the number of rounds.

The privacy spent, as recorded, is ε times the number of times that a record may have been sent. It protects a
`representation` that is replaced by any other (strict), or one `rescaled coordinate`, a number in [0, 1] that changes
while the others stay. The latter is how we read the paper's ε, and it is weak: if one of the d coordinates of z becomes
the smallest or the largest, rescaling moves all others, so that such a change, like one of the whole vector, costs up
to dε.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Privacy, ProblemSpec, Replies, State, Traits
from rayfed.algorithms.adcol import Adcol
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights
from rayfed.privacy import (
    SIMULATION_NOTE,
    check_budget,
    epsilon_spent,
    laplace_like,
    large_delta_note,
    noise_multiplier,
    to_half_l1_ball,
    to_unit_range,
    train_privately,
)

RECORDS_NOTE = (
    "a representation depends on other records through the network, so training data have no record-level privacy"
)


def refuse_shared_predictor(algorithm: Adcol) -> None:
    """Raise UsageError if the head is averaged, as its weights would be sent without protection."""
    if algorithm.share_predictor:
        raise UsageError(f"algorithm.share_predictor=true: {algorithm.name} does not protect what it sends; use false")


@dataclass(frozen=True, kw_only=True)
class DPAdcol(Adcol):
    name: ClassVar[str] = "dp_adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, differential privacy, table 16"
    traits: ClassVar[Traits] = replace(Adcol.traits, depends_on_rounds=True)

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together")
    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    clip: float = option(1.0, above=0, help="C, bound of the L2 norm of the gradient of one representation")
    hidden: list[int] = option([512], low=1, high=65536, help="widths of the discriminator's hidden layers")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_shared_predictor(self)
        if self.network != "mlp":
            raise UsageError(f"algorithm.network={self.network}: batch norm mixes examples; DP-SGD needs mlp")
        fewest = sum(sorted(self.upload_sizes(problem))[: problem.cohort])
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


@dataclass(frozen=True, kw_only=True)
class LocalDPAdcol(Adcol):
    name: ClassVar[str] = "local_dp_adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, differential privacy, table 17"

    epsilon: float = option(5.0, low=1e-6, help="ε of one upload of a record")
    guarantee: str = option(
        "coordinate",
        choices=("coordinate", "strict"),
        help="ε protects each coordinate of a rescaled vector, or the whole vector",
    )
    hidden: list[int] = option([512], low=1, high=65536, help="widths of the discriminator's hidden layers")

    @property
    def strict(self) -> bool:
        return self.guarantee == "strict"

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_shared_predictor(self)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        total = self.epsilon * math.prod(ctx.task.feature_shape)
        weaker = f"; {total:g} per vector, or per coordinate whose change moves the vector's range and all others"
        sizes = list(problem.examples.values())[: problem.task.num_clients]
        times = max(math.ceil(problem.rounds * self.upload_size(n) / n - 1e-9) for n in sizes)
        return (
            f"ε={self.epsilon:g} per " + ("vector" if self.strict else "rescaled coordinate" + weaker),
            f"an upload contains {self.sampling:g} of the records, and each pass over all of them spends ε again: a "
            f"record is sent up to {times} times in {problem.rounds} rounds, which spends {times * self.epsilon:g}",
            RECORDS_NOTE,
            SIMULATION_NOTE,
            *super().notes(ctx, problem),
        )

    def init(self, ctx: Context) -> State:
        # per client, how many times it went through its records so far
        passes = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | {"passes": passes}

    def join(self, ctx: Context) -> State:
        order = torch.randperm(ctx.examples).to(ctx.task.device)
        return super().join(ctx) | {"order": order, "position": torch.tensor(0, device=order.device)}

    def discriminator_input(self, z: Tensor) -> Tensor:
        return to_half_l1_ball(to_unit_range(z)) if self.strict else to_unit_range(z)

    def protect_upload(self, z: Tensor) -> Tensor:
        return z + laplace_like(z, 1 / self.epsilon)

    def select_records(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        order, position, count = client["order"], int(client["position"]), self.upload_size(examples)
        rows = order[position : position + count]
        if position + count >= examples:
            order, position = torch.randperm(examples).to(rows.device), -len(rows)
            rows = torch.cat([rows, order[: count - len(rows)]])
        return client | {"order": order, "position": torch.tensor(position + count, device=rows.device)}, rows

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        passes = server["passes"].clone()
        for reply in replies.each:
            passes[reply.client] += len(reply.up["representations"]) / reply.examples
        return super().aggregate(ctx, server, replies) | {"passes": passes}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        times = math.ceil(float(server["passes"].max()) - 1e-9)
        return Privacy(times * self.epsilon, "representation" if self.strict else "rescaled coordinate")
