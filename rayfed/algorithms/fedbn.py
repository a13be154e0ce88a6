"""FedBN: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", Alg. 1.

    client:  (w_i, b_i) ← (w_t, b_i), then SGD on f_i(w_i, b_i);  b_i: its batch norm, running statistics included
    server:  w_{t+1} = Σ_i p_i w_i

Batch-norm layers are recognised by their type and all of them stay with the client, so `batch_norm=aggregate` and
`batch_norm=local_statistics` have no effect. The paper's Alg. 1 and code average with equal weights, over clients of
equal size. `weighting=equal` does so for any sizes. By default clients are weighted as in FedAvg, so that batch norm is
the only difference from it.
"""

from dataclasses import dataclass, replace

from rayfed.algorithm import ProblemSpec
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.task import Task


def check_batch_norm(problem: ProblemSpec, name: str) -> None:
    """Raise UsageError if the model has no batch norm that the algorithm called `name` could train."""
    if problem.task.batch_norm == "frozen":
        raise UsageError(f"batch_norm=frozen: {name} trains batch norm; use batch_norm=local, or fedavg")
    if not problem.task.batch_norm_names:
        raise UsageError(f"algorithm.name={name}: the model has no batch-norm layer; use another, or fedavg")


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    name = "fedbn"
    reference = "Li et al. 2021 (FedBN), Alg. 1"
    traits = replace(FedAvg.traits, default_eval_point="downloaded")

    bytes_formula = FedAvg.bytes_formula

    def check(self, problem: ProblemSpec) -> None:
        check_batch_norm(problem, self.name)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | task.batch_norm_names
