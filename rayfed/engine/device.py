"""The device of a process: which it is, its memory, and its kernels."""

import contextlib
import ctypes
import functools
import gc
import os
import sys

import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.machine import nvidia_smi
from rayfed.core.rng import choose_deterministic, choose_tf32

CONTEXT_BYTES = 2**29
"""The GPU memory that CUDA takes in every process, beside the tensors, where the driver does not say how much it is."""
_MODELS = 3  # the weights that arrive, the weights in training, and their gradients
_STATES_SHARE = 0.125  # the share of a GPU's memory for the states of clients
# M_… of malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def device_for(gpus: float, model: nn.Module | None = None) -> torch.device:
    """Return the CPU, or if `gpus` is above 0, the visible GPU with the most free memory.

    A share below 1 also limits this process to that share of the GPU's memory, CUDA's context included. So processes
    on the same GPU cannot take it from each other.

    Raises:
        UsageError: torch finds no GPU, or the share cannot hold CUDA's context and `model` in training.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"placement.gpus={gpus:g}: torch finds no CUDA device here; `rayfed doctor` says why, and "
            "placement.gpus=0 does without one"
        )
    _choose_workspace()
    device = torch.device("cuda", _emptiest_gpu())
    memory = torch.cuda.get_device_properties(device).total_memory
    limit = 1.0  # ends the limit of the trial before
    if gpus < 1:
        context = _context_bytes(device)
        _check_share(gpus, memory, context, model)
        limit = gpus - context / memory
    torch.cuda.set_per_process_memory_fraction(limit, device)
    return device


def _choose_workspace() -> None:
    """Choose the memory in which cuBLAS is deterministic; cuBLAS looks at it once, before its first kernel.

    So it is chosen for all trials of a process, also before one that asks for deterministic kernels.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _context_bytes(device: torch.device) -> int:
    """Return the GPU memory that CUDA takes in this process beside the tensors, after its first kernels."""
    _run_first_kernels(device)
    for line in nvidia_smi("pid,used_memory", "compute-apps").splitlines():
        pid, memory = line.split(", ")
        if pid == str(os.getpid()) and memory[:1].isdigit():
            used = int(memory.split()[0]) * 2**20
            return used - torch.cuda.memory_reserved(device)
    return CONTEXT_BYTES  # a driver numbers the processes of a container otherwise


def _run_first_kernels(device: torch.device) -> None:
    ones = torch.ones(64, 64, device=device)
    ones.mm(ones).sum().item()  # loads CUDA's kernels and cuBLAS, and waits


@functools.cache
def _emptiest_gpu() -> int:
    """Return the number of the visible GPU with the most free memory.

    `nvidia-smi` is asked, because CUDA would take memory on every GPU to answer.
    """
    free = {}
    for line in nvidia_smi("uuid,memory.free").splitlines():
        uuid, memory = line.split(", ")
        if memory[:1].isdigit():
            free[uuid] = float(memory.split()[0])

    def free_of(number: int) -> float:
        return free.get(f"GPU-{torch.cuda.get_device_properties(number).uuid}", 0.0)

    count = torch.cuda.device_count()
    if count > 1:
        return max(range(count), key=free_of)
    return 0


def _check_share(gpus: float, memory: int, context: int, model: nn.Module | None) -> None:
    tensors = []
    if model is not None:
        tensors = [*model.parameters(), *model.buffers()]
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    needed = context + _MODELS * model_bytes
    if gpus * memory <= needed:
        here = f"{gpus * memory / 2**30:.3g} of {memory / 2**30:.3g} GiB"
        needs = f"CUDA and the model in training need {needed / 2**30:.3g} GiB in each process"
        remedy = f"give more than {needed / memory:.3g}, by placement.gpus, or placement.server_gpus where the server"
        raise UsageError(f"{gpus:.3g} of this GPU is {here}, but {needs}; {remedy} has hosts")


def device_name(device: torch.device) -> str:
    """Return the name of the type of a GPU, "cpu" for every CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def peak_bytes(device: torch.device) -> int:
    """Return the most GPU memory that this process's tensors took since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def room_for_states(device: torch.device | str, share: float) -> float | None:
    """Return how many bytes of a GPU the states of clients may take, with a share of its memory; None on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] * share * _STATES_SHARE
    return None


def set_kernels(*, deterministic: bool, tf32: bool) -> None:
    """Choose the kernels of this process; without `tf32`, GPUs compute in float32 as CPUs do."""
    if deterministic:
        _choose_workspace()  # without it, torch refuses deterministic kernels of cuBLAS
    choose_deterministic(deterministic)
    choose_tf32(tf32)


def prefers_channels_last(device: torch.device, *, bf16: bool) -> bool:
    """Return whether convolutions are faster in the memory format channels-last.

    A CPU takes 1 / 1.2 to 1 / 1.7 of the time. CUDA has such kernels for half precision; in float32 it would copy.
    """
    return device.type != "cuda" or bf16


def check_bf16(device: torch.device) -> None:
    """Raise UsageError if a GPU cannot compute in bfloat16; every CPU can."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = device_name(device)
        raise UsageError(f"local.precision=bf16: {name} cannot compute in bfloat16; use local.precision=float32")


def keep_freed_memory() -> None:
    """Keep up to half a gigabyte of freed memory in this process for the next batch; does nothing without glibc.

    By default glibc returns large freed blocks to the system at once, so that the activations of every batch cost new
    page faults: scoring the four-layer CNN on MNIST took up to 1.5 times as long.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc accepts
    mallopt(_TRIM_THRESHOLD, 512 * 2**20)


def release_memory() -> None:
    """Free what is no longer used, also for other processes on the GPU; does nothing on a GPU that fails."""
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
