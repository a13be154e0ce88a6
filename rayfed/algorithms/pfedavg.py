"""pFedAvg, a baseline of FRAug: Chen et al. 2023, table 2, which names it without a definition.

    client:  as in FedAvg; its model is scored after local training and before aggregation
    server:  as in FedAvg

Only the score differs: this is FedAvg with `evaluate.points=[trained]`, under its own name for tables. Clients outside
the cohort of a round have no such score in that round.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedAvg(FedAvg):
    name: ClassVar[str] = "pfedavg"
    reference: ClassVar[str] = "Chen et al. 2023 (FRAug), table 2, baseline pFedAvg"
    default_eval_point: ClassVar[str] = "trained"
