"""FedAvg-FT: Collins et al. 2022, "FedAvg with Fine Tuning: Local Updates Lead to Representation Learning".

    training:  FedAvg
    scoring:   w_i ← w_t, then SGD on all of w_i for `evaluate.adapt_epochs` epochs on the client's training data

`fedavg` with `evaluate.points=[adapted]` has the same values; this name makes them a row of their own in tables.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    name: ClassVar[str] = "fedavg_ft"
    reference: ClassVar[str] = "Collins et al. 2022"
    default_eval_point: ClassVar[str] = "adapted"

    bytes_formula = FedAvg.bytes_formula
