"""When the server updates its model: in rounds that wait for a cohort, or whenever a buffer of replies is full.

FedAsync: Xie, Koyejo and Gupta 2019, "Asynchronous Federated Optimization", Alg. 1 and the functions s of section 5.2.
FedBuff: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Alg. 1.

    τ_i: the updates of the server between the start of client i and the update that its reply is part of
    FedAsync, `adds=models`:   x ← (1 − Σ a_i) x + Σ a_i x_i         a_i = p_i α s(τ_i)
    FedBuff,  `adds=updates`:  x ← x + Σ a_i (x_i − x_start(i))

p_i are the weights of the method, normalised over the buffer. FedBuff's are equal; here they are the method's own, so
that FedAvg is the case without staleness. A reply to the newest model has τ = 0, where every s is 1. FedAsync's clients
minimise with a proximal term, which `fedprox` adds. In both forms, running statistics of batch norm are mixed like
models, because a sum of their changes may be a negative variance.
"""

from dataclasses import dataclass

from rayfed.core.errors import UsageError
from rayfed.core.options import option

ROUND_SCHEDULES = {
    "synchronous": "rayfed.core.round_schedule:Synchronous",
    "buffered": "rayfed.core.round_schedule:Buffered",
}


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """The server waits for the clients of a round, which all start from the same model."""


@dataclass(frozen=True, kw_only=True)
class Buffered:
    """The server updates its model whenever `buffer` replies have arrived, and clients start at once in their place."""

    concurrency: int = option(low=1, help="clients that train at a time, on the simulated clock")
    buffer: int = option(low=1, help="replies of an update; 1: FedAsync, more: FedBuff")
    max_staleness: int | None = option(
        None,
        low=0,
        help="updates that a reply may be late; later replies are dropped, and their clients keep their state",
    )
    weighting: str = option(
        "polynomial",
        choices=("constant", "polynomial", "hinge"),
        help="weight of a reply by its staleness t: 1; (1 + t)^-a; or 1 up to b, then 1/(a (t - b) + 1)",
    )
    a: float | None = option(None, above=0, help="a of the weighting; null: 0.5 of polynomial, 10 of hinge")
    b: int = option(4, low=0, help="b of the hinge")
    alpha: float = option(1.0, above=0, high=1, help="mixing rate of the server, by which all weights are multiplied")
    adds: str | None = option(
        None,
        choices=("models", "updates"),
        help="what is added: models as by FedAsync, or changes since the start as by FedBuff; null: models if buffer=1",
    )

    def __post_init__(self) -> None:
        if self.buffer > self.concurrency:
            raise UsageError(
                f"schedule.buffer={self.buffer}: only schedule.concurrency={self.concurrency} clients train at a time; "
                "give a buffer of at most that"
            )

    @property
    def adds_models(self) -> bool:
        """Whether replies are mixed as models, and not as changes since the client's start."""
        if self.adds:
            return self.adds == "models"
        return self.buffer == 1

    def weight(self, staleness: int) -> float:
        """Return α s(τ)."""
        if self.weighting == "polynomial":
            return float(self.alpha * (1 + staleness) ** -(self.a or 0.5))
        if self.weighting == "hinge" and staleness > self.b:
            return self.alpha / ((self.a or 10.0) * (staleness - self.b) + 1)
        return self.alpha
