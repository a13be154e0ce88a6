"""The body and the head of a model with a split point (FedPer, FedRep, FedRoD, FedBABU)."""

from collections.abc import Iterable

from rayfed.algorithm import ProblemSpec
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
