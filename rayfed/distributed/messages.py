"""Values on their way between processes: a pickle, and their tensors as flat byte arrays, which Ray does not copy."""

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from rayfed.engine.serialization import tensor_bytes


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


def unpack(message: Message, device: torch.device) -> Any:
    """Return the value of `message` with its tensors on `device`, in memory of their own."""
    return _Unpickler(message, device).load()


class _Pickler(CloudPickler):
    tensors: list[tuple[np.ndarray, torch.dtype, tuple[int, ...]]]

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append((tensor_bytes(value), value.dtype, tuple(value.shape)))
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, device: torch.device):
        super().__init__(io.BytesIO(message.pickle))
        self._tensors, self._device = message.tensors, device

    def persistent_load(self, number: int) -> Tensor:
        data, dtype, shape = self._tensors[number]
        if not data.size:
            return torch.empty(shape, dtype=dtype, device=self._device)
        raw = torch.from_numpy(data.copy())  # the object store's pages are read-only
        return raw.view(dtype).reshape(shape).to(self._device)
