"""pFedAvg, a baseline of FRAug: Chen et al. 2023, table 2, which names it without a definition.

    client:  w_i ← w_t, then SGD on f_i as in FedAvg;  w_i is scored, before aggregation
    server:  w_{t+1} = Σ_i p_i w_i

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
