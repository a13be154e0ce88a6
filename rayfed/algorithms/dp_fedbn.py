"""DP-FedBN, private baselines of ADCOL: Li, He and Song 2023. In table 17 the server is curious, and the clients add
Laplace noise. In appendix B.12 it is trusted and adds Gaussian noise, after McMahan et al. 2018, "Learning
Differentially Private Recurrent Language Models". The update Δ_i is w_i − w_t without batch norm.

    dp_fedbn:           client:  Δ_i clipped to an L1 norm of C;  sends w_t + Δ_i + Lap(2C/ε_round) on each coordinate
                        server:  FedBN, with equal weights unless weighting=examples
    gaussian_dp_fedbn:  client:  Δ_i clipped to an L2 norm of C;  sends w_t + Δ_i
                        server:  w_{t+1} = w_t + 1/m · Σ_i Δ_i + N(0, (σ · 2C/m)²) on each coordinate, over the m
                                 clients of a round

Integer buffers are sent as they were received. The budget covers the rounds in which a client can take part. With full
participation these are all rounds. Otherwise they are one in ⌊N/cohort⌋, since clients are sampled without replacement
until all have taken part. The paper's second variant samples a fifth of them per round. The clipping bound and the
weights are not in the paper.

Laplace: two clipped updates are at most 2C apart in L1, so a round spends ε_round for a client's whole update; ε is
split evenly over the rounds. Equal weights are the default because ε covers what a client sends, and its number of
examples would be sent beside it.

Gaussian: replacing the data of one client by those of another, of whatever number, moves the mean by at most 2C/m.
Weights n_i/Σn would change for all clients with the size of one. The noise multiplier σ is the least with which the
rounds together satisfy (ε, δ), by Rényi accounting. Amplification by sampling is not counted, since cohorts have a
fixed size. This notion of neighbours is our choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rayfed.algorithm import Algorithm, Context, ProblemSpec, Traits
from rayfed.algorithms.common.channelled import Channelled
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.fedbn import FedBN, check_batch_norm
from rayfed.channel.accounting import SIMULATION_NOTE, check_budget, large_delta_note
from rayfed.channel.channel import Channel
from rayfed.channel.checks import refuse_unusual
from rayfed.channel.privacy import Gaussian, Laplace, Privacy
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import without


@dataclass(frozen=True, kw_only=True)
class PrivateFedBN(Channelled):
    """The part that both forms share: FedBN with a channel that clips and adds noise."""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(super().traits, sample_without_replacement=True, depends_on_rounds=True)

    base: Algorithm = field(init=False, default=FedBN())
    channel: Channel = field(init=False, default=Channel())
    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together, per client")
    clip: float = option(1.0, above=0, help="C, bound of the norm of an update: L1, or L2 in gaussian_dp_fedbn")
    weighting: str = option("equal", choices=("equal",), help="ε would not cover the numbers of examples")

    def __post_init__(self) -> None:
        channel = Channel(privacy=self.mechanism, sampling="without_replacement")
        vars(self).update(base=FedBN(weighting=self.weighting), channel=channel)

    @property
    def mechanism(self) -> Privacy:
        """The mechanism of differential privacy."""
        raise NotImplementedError

    def personal(self, task: Task) -> frozenset[str]:
        """Return the names of the weights that stay with the client."""
        return FedBN().personal(task)

    def check(self, problem: ProblemSpec) -> None:
        check_batch_norm(problem, self.name)
        sent = without(problem.task.initial_weights(), self.personal(problem.task))
        refuse_unusual(sent, f"algorithm.name={self.name} clips and adds noise to")


@dataclass(frozen=True, kw_only=True)
class DPFedBN(PrivateFedBN):
    name = "dp_fedbn"
    reference = "Li, He and Song 2023, table 17, baseline DP-FedBN"

    weighting: str = weighting_option("equal", "; ε does not cover the numbers of examples")

    @property
    def mechanism(self) -> Privacy:
        return Laplace(epsilon=self.epsilon, clip=self.clip, local=True)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        multiplier = self.channel.multiplier(ctx)
        noise = (
            f"ε={self.epsilon:g} per client, {1 / multiplier:.4g} per participation: Laplace noise of scale "
            f"{2 * self.clip * multiplier:.4g} on every weight"
        )
        sizes = "the numbers of examples are sent in clear, for the weights of the mean: ε does not cover them"
        return (noise, SIMULATION_NOTE) if self.weighting == "equal" else (noise, sizes, SIMULATION_NOTE)


@dataclass(frozen=True, kw_only=True)
class GaussianDPFedBN(PrivateFedBN):
    name = "gaussian_dp_fedbn"
    reference = "Li, He and Song 2023, appendix B.12, DP-FedBN with a trusted server"

    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")

    @property
    def mechanism(self) -> Privacy:
        return Gaussian(epsilon=self.epsilon, delta=self.delta, clip=self.clip)

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_budget(self.epsilon, self.delta, problem.rounds)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        times = self.channel.composition(ctx.rounds, ctx.task.num_clients, len(ctx.cohort)).steps
        sigma = self.channel.multiplier(ctx)
        return (
            f"ε={self.epsilon:g} at δ={self.delta:g} per client protects what the server sends; uploads are not "
            "protected",
            f"Gaussian noise of σ={sigma:.4g} times the most that a client can change, for {times} participations",
            *large_delta_note(self.delta, ctx.task.num_clients, "clients"),
            SIMULATION_NOTE,
        )
