"""What AFL, Gen-AFL and VM share: clients report their mean loss, and the server weighs the models by these losses.

They need every client in every round: their weights over a part of the clients do not sum to 1, and negative ones
cannot be renormalised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ProblemSpec, Reply
from rayfed.algorithms.common.full_participation import refuse_sampling
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.batch_norm import batch_norm_statistics
from rayfed.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LossWeighted(FedAvg):
    without_averages: ClassVar[str] = "local_statistics, local or frozen"  # batch_norm that averages no statistics

    @property
    def extrapolates(self) -> bool:
        """Whether weights may be negative."""
        return False

    def check(self, problem: ProblemSpec) -> None:
        refuse_sampling(problem, self.name, "weighs the clients by the losses of all of them")
        if self.extrapolates:
            self._refuse_averaged_statistics(problem)

    def _refuse_averaged_statistics(self, problem: ProblemSpec) -> None:
        """Negative weights would make negative variances of batch norm's running ones."""
        task = problem.task
        if task.batch_norm != "frozen" and batch_norm_statistics(task.model.module) - self.personal(task):
            raise UsageError(
                f"batch_norm={task.batch_norm}: algorithm.name={self.name} may give clients negative weights, which "
                f"turn averaged running variances negative; use batch_norm={self.without_averages}, or a model "
                "without batch norm"
            )


def reported(replies: Sequence[Reply]) -> tuple[Tensor, Tensor]:
    """(losses f_i, shares n_i / N) [clients] in float64, in the order of the replies."""
    losses = torch.stack([reply.up["loss"].double() for reply in replies])
    examples = torch.tensor([float(reply.examples) for reply in replies], dtype=torch.float64, device=losses.device)
    return losses, examples / examples.sum()
