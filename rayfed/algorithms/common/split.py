"""Body and head of a model that is split, as FedPer, FedRep, FedRoD and FedBABU need them."""

from collections.abc import Iterable

from rayfed.algorithm import ProblemSpec
from rayfed.core.errors import UsageError
from rayfed.core.task import Task


def body(task: Task) -> tuple[str, ...]:
    """Names of what can be trained in front of the split."""
    return tuple(name for name in task.trainable if name not in task.head_names)


def head(task: Task) -> tuple[str, ...]:
    """Names of what can be trained behind the split."""
    return tuple(name for name in task.trainable if name in task.head_names)


def refuse_without(problem: ProblemSpec, name: str, parts: Iterable[str] = ("head", "body")) -> None:
    """Raises UsageError if one of `parts` of the model has nothing to train."""
    found = {"head": head(problem.task), "body": body(problem.task)}
    for part in parts:
        if not found[part]:
            raise UsageError(
                f"algorithm.name={name}: the model's {part} has nothing to train; choose a model whose split leaves "
                "trainable layers on both sides"
            )
