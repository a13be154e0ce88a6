"""The device that a process was given a share of."""

import torch

from rayfed.core.errors import UsageError


def device_for(gpus: float) -> torch.device:
    """The CPU, or the first visible GPU; a share below 1 also caps this process's memory there, to spare neighbours.

    Raises:
        UsageError: a GPU is asked for where torch finds none.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"placement.gpus={gpus:g}: torch finds no CUDA device in this process; use placement.gpus=0")
    device = torch.device("cuda:0")
    if gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus, device)
    return device
