"""The device of a process."""

import os

import torch

from rayfed.core.errors import UsageError
from rayfed.core.rng import choose_deterministic

CONTEXT_BYTES = 2**29
"""The GPU memory that CUDA takes in every process, beside the tensors."""
_STATES_SHARE = 0.125  # the share of a GPU's memory for the states of clients


def device_for(gpus: float) -> torch.device:
    """Return the CPU, or the first visible GPU if `gpus` is above 0.

    A share below 1 also limits this process to that share of the GPU's memory, CUDA's context included, so that
    processes on the same GPU cannot take it from each other.

    Raises:
        UsageError: torch finds no GPU.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"placement.gpus={gpus:g}: torch finds no CUDA device here; `rayfed doctor` says why, and "
            "placement.gpus=0 does without one"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts, if kernels are deterministic
    device = torch.device("cuda:0")
    context = CONTEXT_BYTES / torch.cuda.get_device_properties(device).total_memory
    limit = max(gpus - context, gpus / 2) if gpus < 1 else 1.0  # the last one ends the limit of a trial before
    torch.cuda.set_per_process_memory_fraction(limit, device)
    return device


def room_for_states(device: torch.device | str, share: float) -> float | None:
    """Return how many bytes of a GPU the states of clients may take, with a share of its memory; None on a CPU."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[1] * share * _STATES_SHARE if device.type == "cuda" else None


def set_kernels(*, deterministic: bool, tf32: bool) -> None:
    """Choose the kernels of this process; without `tf32`, GPUs compute in float32 as CPUs do."""
    choose_deterministic(deterministic)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


def breaks_device(error: BaseException) -> bool:
    """Return whether `error` says that CUDA fails in this process from now on, as after an assertion in a kernel.

    That the memory is out is no such error.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and "CUDA error" in text and "out of memory" not in text
