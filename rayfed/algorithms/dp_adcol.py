"""ADCOL with differential privacy: Li, He and Song 2023, for a trusted server (table 16, dp_adcol: DP-SGD trains the
discriminator) and for an honest but curious server (table 17, local_dp_adcol: private uploads).

    dp_adcol:        each step draws each representation with probability q, clips its gradient to an L2 norm of C, and
                     adds noise σC to the sum;  a round has server_epochs · ⌈1/q⌉ steps, with
                     q = server_batch_size / n fixed by the n representations of round 1
    local_dp_adcol:  a client sends z' + Lap(1/ε) on each coordinate, z' being z rescaled to [0, 1]; its divergence sees
                     z';  the server is that of ADCOL

In dp_adcol, the server receives representations as they are, and protects what it sends. The noise multiplier σ is the
least with which all rounds together satisfy (ε, δ), by Rényi accounting. The privacy spent, as recorded, is the ε at δ
of the steps so far. Neighbouring pools differ in one `representation`, which is in the pool of every round or of none.
C, σ and the batch size are our choices.

For local_dp_adcol, the paper's text prints "Gau" and defines "Lap". With guarantee=strict, z' is then scaled to an L1
norm of 1/2, so that ε holds for the vector as a whole. In each round a client sends a share of its representations
(`sampling`). It draws records without replacement across rounds and starts again when all were sent once. To spend ε
only once, as the paper does, `sampling` must be at most one over the number of rounds.

The privacy spent, as recorded, is ε times the number of times that a record may have been sent. It protects a
`representation` that is replaced by any other (strict), or one `rescaled coordinate`, a number in [0, 1] that changes
while the others stay. The latter is how we read the paper's ε, and it is weak. If one of the d coordinates of z becomes
the smallest or the largest, rescaling moves all others. Such a change costs up to dε, like one of the whole vector.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayfed.algorithm import Context, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.adcol import Adcol
from rayfed.channel.accounting import SIMULATION_NOTE, check_budget, epsilon_spent, large_delta_note, noise_multiplier
from rayfed.channel.mechanisms import laplace_like, to_half_l1_ball, to_unit_range, train_privately
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights

RECORDS_NOTE = (
    "a representation depends on other records through the network, so training data have no record-level privacy"
)


def refuse_shared_predictor(algorithm: Adcol) -> None:
    """Raise UsageError if the head is averaged, as its weights would be sent without protection."""
    if algorithm.share_predictor:
        raise UsageError(f"algorithm.share_predictor=true: {algorithm.name} does not protect what it sends; use false")


@dataclass(frozen=True, kw_only=True)
class DPAdcol(Adcol):
    name = "dp_adcol"
    reference = "Li, He and Song 2023, differential privacy, table 16"
    traits = replace(Adcol.traits, depends_on_rounds=True)

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together")
    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    clip: float = option(1.0, above=0, help="C, bound of the L2 norm of the gradient of one representation")
    hidden: list[int] = option([512], low=1, high=65536, help="widths of the discriminator's hidden layers")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_shared_predictor(self)
        if self.network != "mlp":
            raise UsageError(f"algorithm.network={self.network}: batch norm mixes examples; DP-SGD needs mlp")
        uploads = sorted(self.upload_sizes(problem))
        fewest = sum(uploads[: problem.cohort])
        steps = self.steps_per_round(self.server_batch_size / fewest)
        check_budget(self.epsilon, self.delta, steps * problem.rounds)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        vectors = sum(self.upload_sizes(problem))
        return (
            f"ε={self.epsilon:g} at δ={self.delta:g} protects what the server sends; uploads are not protected",
            *large_delta_note(self.delta, vectors, "representations"),
            RECORDS_NOTE,
            SIMULATION_NOTE,
            *super().notes(ctx, problem),
        )

    def init(self, ctx: Context) -> State:
        zero = torch.zeros((), dtype=torch.float64, device=ctx.task.device)
        server = super().init(ctx)
        server["accounting"] = {"sigma": zero, "rate": zero.clone(), "steps": zero.clone()}
        return server

    def steps_per_round(self, rate: float) -> int:
        """Return the steps of DP-SGD in a round, at a sampling rate q of `rate`."""
        return self.epochs_per_round * math.ceil(1 / rate - 1e-9)

    def train_discriminator(self, ctx: Context, server: State, weights: Weights, z: Tensor, labels: Tensor) -> State:
        accounting = server["accounting"]
        rate = float(accounting["rate"])  # 0 before the first round
        if not rate:
            rate = min(1.0, self.server_batch_size / len(z))
        steps = self.steps_per_round(rate)
        sigma = float(accounting["sigma"])
        if not sigma:
            all_steps = steps * ctx.rounds
            sigma = noise_multiplier(self.epsilon, self.delta, rate=rate, steps=all_steps)
        outputs = ctx.task.num_clients
        if self.fixed_size:
            outputs = len(ctx.cohort)
        discriminator = self.build_discriminator(ctx.task, outputs)
        trained = train_privately(
            discriminator.to(ctx.task.device),
            weights,
            z,
            labels,
            optimizer=self.server_optimizer(ctx),
            rate=rate,
            steps=steps,
            sigma=sigma,
            clip=self.clip,
        )
        accounting = {
            "sigma": torch.full_like(accounting["sigma"], sigma),
            "rate": torch.full_like(accounting["rate"], rate),
            "steps": accounting["steps"] + steps,
        }
        return {"discriminator": trained, "accounting": accounting}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        accounting = server["accounting"]
        sigma = float(accounting["sigma"])
        rate = float(accounting["rate"])
        steps = round(float(accounting["steps"]))
        epsilon = epsilon_spent(sigma, self.delta, rate=rate, steps=steps)
        return Privacy(epsilon, "representation")


@dataclass(frozen=True, kw_only=True)
class LocalDPAdcol(Adcol):
    name = "local_dp_adcol"
    reference = "Li, He and Song 2023, differential privacy, table 17"

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
        protected = "vector"
        if not self.strict:
            total = self.epsilon * math.prod(ctx.task.feature_shape)
            protected = (
                f"rescaled coordinate; {total:g} per vector, or per coordinate whose change moves the vector's range "
                "and all others"
            )
        times = self.most_uploads_of_a_record(problem)
        spent = times * self.epsilon
        return (
            f"ε={self.epsilon:g} per {protected}",
            f"an upload contains {self.sampling:g} of the records, and each pass over all of them spends ε again: a "
            f"record is sent up to {times} times in {problem.rounds} rounds, which spends {spent:g}",
            RECORDS_NOTE,
            SIMULATION_NOTE,
            *super().notes(ctx, problem),
        )

    def most_uploads_of_a_record(self, problem: ProblemSpec) -> int:
        """Return how often a client that takes part in all rounds sends a record at most."""
        most = 0
        sizes = list(problem.examples.values())
        for n in sizes[: problem.task.num_clients]:
            passes = problem.rounds * self.upload_size(n) / n
            most = max(most, math.ceil(passes - 1e-9))
        return most

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        # per client, how many times it went through its records so far
        server["passes"] = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return server

    def join(self, ctx: Context) -> State:
        order = torch.randperm(ctx.examples).to(ctx.task.device)
        client = super().join(ctx)
        client["order"] = order
        client["position"] = torch.tensor(0, device=order.device)
        return client

    def discriminator_input(self, z: Tensor) -> Tensor:
        z = to_unit_range(z)
        if self.strict:
            z = to_half_l1_ball(z)
        return z

    def protect_upload(self, z: Tensor) -> Tensor:
        return z + laplace_like(z, 1 / self.epsilon)

    def select_records(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        """Return the next records of a random order; after the last one, those of another order."""
        order = client["order"]
        first = int(client["position"])
        last = first + self.upload_size(examples)
        rows = order[first:last]
        if last >= examples:
            order = torch.randperm(examples).to(rows.device)
            last -= examples
            rows = torch.cat([rows, order[:last]])
        position = torch.tensor(last, device=rows.device)
        return client | {"order": order, "position": position}, rows

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        passes = server["passes"].clone()
        for reply in replies.each:
            sent = len(reply.up["representations"])
            passes[reply.client] += sent / reply.examples
        return super().aggregate(ctx, server, replies) | {"passes": passes}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        passes = float(server["passes"].max())
        times = math.ceil(passes - 1e-9)
        unit = "representation" if self.strict else "rescaled coordinate"
        return Privacy(times * self.epsilon, unit)
