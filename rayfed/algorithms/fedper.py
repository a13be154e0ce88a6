"""FedPer: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", Alg. 1 and 2.

    client:  w_i = (base received, head of client i); SGD on f_i over both at once, for all local epochs
    server:  FedAvg of the bases

The base is the model's body, the part before its split; the personalisation layers are its head, the part after it.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithm import ProblemSpec
from rayfed.algorithms.common.split import refuse_without
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.task import Task


@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    name: ClassVar[str] = "fedper"
    reference: ClassVar[str] = "Arivazhagan et al. 2019, Alg. 1 and 2"
    default_eval_point: ClassVar[str] = "downloaded"

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | task.head_names
