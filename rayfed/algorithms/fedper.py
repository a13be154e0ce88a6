"""FedPer: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", Alg. 1 and 2.

    client:  w_i = (base received, head of client i); SGD on f_i over both at once, for all local epochs
    server:  FedAvg of the bases

The base is the model's body, the part before its split; the personalisation layers are its head, the part after it.
FedRep and FedBABU derive from this class, and train body and head in other phases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithm import ProblemSpec
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.task import Task


def body(task: Task) -> tuple[str, ...]:
    """Return the names of the trainable weights before the split."""
    return tuple(name for name in task.trainable if name not in task.head_names)


def head(task: Task) -> tuple[str, ...]:
    """Return the names of the trainable weights after the split."""
    return tuple(name for name in task.trainable if name in task.head_names)


def refuse_without(problem: ProblemSpec, name: str, parts: Iterable[str] = ("head", "body")) -> None:
    """Raise UsageError if one of `parts` of the model has no trainable weights."""
    trainable = {"head": head(problem.task), "body": body(problem.task)}
    for part in parts:
        if not trainable[part]:
            raise UsageError(
                f"algorithm.name={name}: the model's {part} has nothing to train; choose a model whose split leaves "
                "trainable layers on both sides"
            )


@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    name: ClassVar[str] = "fedper"
    reference: ClassVar[str] = "Arivazhagan et al. 2019, Alg. 1 and 2"
    default_eval_point: ClassVar[str] = "downloaded"

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | task.head_names
