"""A second device for machines without one: its tensors refuse to meet those of the CPU, and compute as on the CPU.

Code that forgets to move a tensor works on a CPU and fails on a user's GPU. On this device it fails here too, and what
does not fail gives the CPU's bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"


class WrongDevice(RuntimeError):
    """An operation that would fail on a GPU."""


class There(Tensor):
    """A tensor on the stand-in device, around the tensor `here` of the CPU."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made = Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            layout=here.layout,
            device=torch.device(NAME, 0),
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _OnStandIn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


COPIES = ("aten::_to_copy", "aten::copy_")
INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    there = [value for value in given if isinstance(value, There)]
    name = func._schema.name
    wanted = kwargs.get("device")
    if there:
        _check(func, name, args, given)
    plain = dict(kwargs)
    if _is_there(wanted):
        plain["device"] = torch.device("cpu")
    result_there = _is_there(wanted) if wanted is not None else bool(there)
    if name == "aten::copy_":
        result_there = isinstance(args[0], There)
    if result_there and plain.get("generator") is not None:
        raise WrongDevice(f"{name}: a generator of the CPU for a result on the device")
    args_here, kwargs_here = tree_map(_here, (args, plain))
    result = func(*args_here, **kwargs_here)
    if not result_there:
        return result
    written = {id(_here(a)): a for a in given if isinstance(a, There)}
    return tree_map(lambda value: written.get(id(value), There(value)) if isinstance(value, Tensor) else value, result)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, There) else value


def _check(func: Any, name: str, args: Any, given: list[Tensor]) -> None:
    if name in COPIES:
        return
    strangers = [value for value in given if not isinstance(value, There)]
    if name in INDEXED and isinstance(args[0], There):
        strangers = [v for v in strangers if v.dtype not in (torch.long, torch.bool) and v.dim()]
    elif torch.Tag.pointwise in func.tags and isinstance(_first(given), There):
        strangers = [v for v in strangers if v.dim()]
    if strangers:
        raise WrongDevice(f"{name}: a tensor of the CPU {tuple(strangers[0].shape)} with one of the device")


def _first(given: list[Tensor]) -> Tensor:
    """The first that is not a single number: its device is the result's."""
    return next((value for value in given if value.dim()), given[0])


def register() -> None:
    """Makes the device known to torch; before the process's first backward pass, which counts the devices."""
    _setup_privateuseone_for_python_backend(NAME)


@contextmanager
def stand_in_device() -> Iterator[torch.device]:
    """The device, while it exists."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) goes through the mode, too
    try:
        with _OnStandIn():
            yield torch.device(NAME, 0)
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
