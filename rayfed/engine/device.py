"""The device of a process."""

import os

import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.rng import choose_deterministic

CONTEXT_BYTES = 2**29
"""The GPU memory that CUDA takes in every process, beside the tensors."""
_MODELS = 3  # the weights that arrive, those that are trained, and their gradients
_STATES_SHARE = 0.125  # the share of a GPU's memory for the states of clients


def device_for(gpus: float, model: nn.Module | None = None) -> torch.device:
    """Return the CPU, or the first visible GPU if `gpus` is above 0.

    A share below 1 also limits this process to that share of the GPU's memory, CUDA's context included, so that
    processes on the same GPU cannot take it from each other.

    Args:
        gpus: The GPUs that the process reserved.
        model: The model of the simulation, where there is one yet.

    Raises:
        UsageError: torch finds no GPU, or the share cannot hold CUDA's context and the model in training.
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
    memory = torch.cuda.get_device_properties(device).total_memory
    if gpus < 1:
        _check_share(gpus, memory, model)
    limit = gpus - CONTEXT_BYTES / memory if gpus < 1 else 1.0  # the last one ends the limit of a trial before
    torch.cuda.set_per_process_memory_fraction(limit, device)
    return device


def _check_share(gpus: float, memory: int, model: nn.Module | None) -> None:
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    needed = CONTEXT_BYTES + _MODELS * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if gpus * memory <= needed:
        raise UsageError(
            f"{gpus:.3g} of this GPU is {gpus * memory / 2**30:.3g} of {memory / 2**30:.3g} GiB, but CUDA and the "
            f"model in training need {needed / 2**30:.3g} GiB in each process; give more than {needed / memory:.3g}, "
            "by placement.gpus, or placement.server_gpus where the server has hosts"
        )


def peak_bytes(device: torch.device) -> int:
    """Return the most memory of a GPU that this process's tensors took since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


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
