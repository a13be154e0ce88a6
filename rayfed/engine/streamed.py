"""Examples that stay in a file or in memory and are read batch by batch."""

import math

import numpy as np
import torch
from torch import Tensor

from rayfed.core.memory import memory_bytes
from rayfed.data.lazy_rows import LazyRows


class Streamed:
    """A stand-in for a tensor [n, ...] on `device` that reads rows when they are indexed, with numbers on the CPU."""

    def __init__(self, source: np.ndarray | LazyRows, device: torch.device):
        self.source, self.device = source, device
        self.dtype = torch.from_numpy(np.empty(0, source.dtype)).dtype

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        return self._read(rows.numpy())

    def __getitem__(self, some: slice) -> Tensor:
        return self._read(np.arange(*some.indices(len(self.source))))

    def _read(self, rows: np.ndarray) -> Tensor:
        pinned = self.device.type == "cuda"  # the copy to the GPU then does not hold up the next batch
        batch = torch.empty((len(rows), *self.source.shape[1:]), dtype=self.dtype, pin_memory=pinned)
        if isinstance(self.source, LazyRows):
            self.source.read(rows, batch.numpy())
        else:
            np.take(self.source, rows, axis=0, out=batch.numpy(), mode="clip")  # "raise" would buffer the whole
        return batch.to(self.device, non_blocking=True)


def room_for(data_on_device: bool | None, device: torch.device | str, share: float = 1.0) -> float:
    """Return how many bytes of examples may be kept on the device: all, none, or by default a quarter of the memory.

    Args:
        data_on_device: True for all, False for none, None for the default.
        share: This host's share of the memory of the GPU, or of the machine, on which all hosts are assumed to run.
    """
    if data_on_device is not None:
        return math.inf if data_on_device else 0.0
    device = torch.device(device)
    whole = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory_bytes()
    return whole * share / 4
