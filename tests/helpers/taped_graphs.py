"""A stand-in for CUDA graphs on the CPU: it records the operations of a step and repeats them on the same tensors.

As in a graph, numbers from Python are repeated as they were, results are written to the same memory each time, and what
would wait for a GPU cannot be captured.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.core.trees import tree_map
from rayfed.engine.graphs import NotCaptured

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2")


class Tape(TorchDispatchMode):
    """The operations that are dispatched, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING:
            raise NotCaptured("it waits")
        self.operations.append((func, args, kwargs or {}, result := func(*args, **(kwargs or {}))))
        return result

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, result in self.operations:
            tree_map(_overwrite, result, func(*args, **kwargs))


def _overwrite(old: Tensor, new: Tensor) -> None:
    if not old.is_set_to(new):
        old.copy_(new)


def capture(run: Any) -> Any:
    """Capture a function in the way of `rayfed.engine.graphs.Capture`."""
    run()  # warms up, and leaves other values in the memory
    with Tape() as tape:
        result = run()
    return tape.play, result
