"""pFedAvg, the baseline of FRAug: Chen et al. 2023, table 2, which names it and does not define it.

    client:  as FedAvg; scored is its model after local training and before aggregation
    server:  as FedAvg

So nothing but the score differs: FedAvg with `evaluate.points=[trained]`, under a name of its own for tables. Clients
that are not asked in a round have no such score in it.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedAvg(FedAvg):
    """Sends weights and keeps nothing; scored is the locally trained model."""

    name: ClassVar[str] = "pfedavg"
    reference: ClassVar[str] = "Chen et al. 2023 (FRAug), table 2, baseline pFedAvg"
    default_eval_point: ClassVar[str] = "trained"
