"""Values on their way between processes: a pickle, and their tensors as flat byte arrays, which Ray does not copy."""

import io
import pickle
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from rayfed.engine.serialization import tensor_bytes

_ALIGNMENT = 64  # bytes, that of torch's own tensors: with another one, kernels may be slow or round differently


class Message(NamedTuple):
    """A value for another process.

    Attributes:
        pickle: The value with a number in place of each tensor.
        tensors: The bytes of each tensor in row-major order, its dtype and its shape.
    """

    pickle: bytes
    tensors: list[tuple[np.ndarray, torch.dtype, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(data.nbytes for data, _, _ in self.tensors)


def pack(value: Any) -> Message:
    """Return `value`, which may be anything that can be pickled, as a message."""
    file = io.BytesIO()
    pickler: Any = _Pickler(file, protocol=5)  # type: ignore[no-untyped-call]
    pickler.tensors = []
    pickler.dump(value)
    return Message(file.getvalue(), pickler.tensors)


def unpack(message: Message, device: torch.device, *, shared: bool = False) -> Any:
    """Return the value of `message` with its tensors on `device`, in memory of their own.

    With `shared`, large tensors on a CPU may be those of the message, which lie in the object store: nobody may modify
    them, and while one of them lives, so does the whole object.
    """
    return _Unpickler(message, device, shared=shared).load()


class _Pickler(CloudPickler):
    tensors: list[tuple[np.ndarray, torch.dtype, tuple[int, ...]]]

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append((tensor_bytes(value), value.dtype, tuple(value.shape)))
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, device: torch.device, *, shared: bool):
        super().__init__(io.BytesIO(message.pickle))
        self._tensors, self._device = message.tensors, device
        self._shared = shared or device.type != "cpu"  # the device has memory of its own

    def persistent_load(self, number: int) -> Tensor:
        data, dtype, shape = self._tensors[number]
        if not data.size:
            return torch.empty(shape, dtype=dtype, device=self._device)
        if not self._shared or data.ctypes.data % _ALIGNMENT:
            data = data.copy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
            raw = torch.from_numpy(data)
        return raw.view(dtype).reshape(shape).to(self._device)
