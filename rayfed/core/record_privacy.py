"""The options of DP-SGD, which protects single records of a client. This module imports no torch."""

from dataclasses import dataclass

from rayfed.core.errors import UsageError
from rayfed.core.options import option

KEY = "local.privacy"


@dataclass(frozen=True, kw_only=True)
class RecordPrivacy:
    """local.privacy.*: DP-SGD, which protects single records of a client.

    Give `noise_multiplier`, or `target_epsilon` for the least noise with which no client spends more. With
    noise_multiplier=0, gradients are clipped alone, without a guarantee.
    """

    noise_multiplier: float | None = option(
        None, low=0, help="σ: noise of standard deviation σC on the sum of gradients, in place of target_epsilon"
    )
    target_epsilon: float | None = option(
        None, low=1e-6, help="ε that no client spends in all rounds, in place of noise_multiplier"
    )
    delta: float | None = option(None, above=0, below=1, help="δ, less than one over the records of every client")
    max_grad_norm: float = option(1.0, above=0, help="C, bound of the L2 norm of the gradient of one record")
    accountant: str = option(
        "rdp", choices=("rdp", "prv"), help="Rényi, or tighter: privacy loss, up to 1 s for each number of steps"
    )

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise UsageError(
                f"{KEY}: give noise_multiplier or target_epsilon, and not both, such as {KEY}.target_epsilon=8"
            )
        if self.delta is None and self.noise_multiplier != 0:
            raise UsageError(f"{KEY}.delta: needed for a guarantee, such as 1e-5; less than one over the records")


def sampling_rate(batch_size: int, records: int) -> float:
    """Return q, the probability with which a record is in a batch of `batch_size` records on average."""
    return min(1.0, batch_size / records)
