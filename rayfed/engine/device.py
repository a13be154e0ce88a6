"""The device of a process."""

import torch

from rayfed.core.errors import UsageError


def device_for(gpus: float) -> torch.device:
    """Return the CPU, or the first visible GPU if `gpus` is above 0.

    A share below 1 also limits this process to that share of the GPU's memory, so that processes on the same GPU cannot
    take it from each other.

    Raises:
        UsageError: torch finds no GPU.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"placement.gpus={gpus:g}: torch finds no CUDA device in this process; use placement.gpus=0")
    device = torch.device("cuda:0")
    if gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus, device)
    return device
