"""A second device for machines without one: its tensors refuse to meet those of the CPU, and compute as on the CPU.

Code that forgets to move a tensor works on a CPU and fails on a user's GPU. On this device it fails here too, and what
does not fail gives the CPU's bits.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
_casts = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")


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


drawn: list[str] = []
"""The operations that drew random numbers on the device, whose streams are not those of the CPU."""

waited: list[str] = []
"""The operations that would wait for a GPU: those that tell the processor a value, and copies that are not
`non_blocking`. What `tolist` returns is not among them."""

COPIES = ("aten::_to_copy", "aten::copy_")
READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")
NONDETERMINISTIC = ("cumsum", "cumprod", "histc", "kthvalue", "put_", "_adaptive_avg_pool2d_backward")
NONDETERMINISTIC += ("adaptive_max_pool2d_backward", "upsample_bilinear2d_backward", "reflection_pad2d_backward")
"""Some of the operations whose kernels for CUDA torch refuses where they have to be deterministic."""
INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [*_tensors(args), *_tensors(kwargs.values())]
    there = any(isinstance(value, There) for value in given)
    name = func._schema.name
    wanted = kwargs.get("device")
    if there:
        _check(func, name, args, given)
    plain = {key: _here(value) for key, value in kwargs.items()}
    if _is_there(wanted):
        plain["device"] = torch.device("cpu")
    result_there = _is_there(wanted) if wanted is not None else there
    if name == "aten::copy_":
        result_there = isinstance(args[0], There)
    if result_there and plain.get("generator") is not None:
        raise WrongDevice(f"{name}: a generator of the CPU for a result on the device")
    if result_there and torch.Tag.nondeterministic_seeded in func.tags:
        drawn.append(name)
    refused = name.removeprefix("aten::") in NONDETERMINISTIC and torch.are_deterministic_algorithms_enabled()
    if there and refused and given[0].is_floating_point():
        raise RuntimeError(f"{name} has no deterministic kernel")
    if _waits(name, args, kwargs, there, result_there):
        waited.append(name)
    result = func(*map(_here, args), **plain)
    if not result_there:
        return result
    written = {id(value.here): value for value in given if isinstance(value, There)}
    return _mapped(lambda value: written[id(value)] if id(value) in written else There(value), result)


# The arguments and results of an operation are tensors, numbers, and lists or tuples of them. torch's functions for
# trees of any kind would take more than half of the time.


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, item) for item in value])
    return value


def _here(value: Any) -> Any:
    return _mapped(lambda tensor: tensor.here if isinstance(tensor, There) else tensor, value)


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


def _waits(name: str, args: Any, kwargs: dict[str, Any], there: bool, result_there: bool) -> bool:
    tensors = list(_tensors(args))
    if name in COPIES and tensors:  # a number becomes a tensor by such an operation, too
        source = tensors[-1]
        blocking = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
        return blocking and isinstance(source, There) != result_there
    if name == "aten::where":
        return there and not all(isinstance(value, There) for value in tensors)
    if name in INDEXED:
        return there and any(value.dtype == torch.bool for value in tensors[1:])
    return there and name.removeprefix("aten::") in READING


def _first(given: list[Tensor]) -> Tensor:
    """The first that is not a single number: its device is the result's."""
    return next((value for value in given if value.dim()), given[0])


def register() -> None:
    """Makes the device known to torch; before the process's first backward pass, which counts the devices."""
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # autocast asks, and casts nothing here
    _casts.fallback(torch.library.fallthrough_kernel)  # torch has one for every device but this


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
