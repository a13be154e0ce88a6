"""What a process asks of its GPU, with a CUDA that only answers."""

from types import SimpleNamespace

import pytest
import torch

from rayfed.core.errors import UsageError
from rayfed.core.user_files import error_line
from rayfed.engine.device import CONTEXT_BYTES, breaks_device, device_for


@pytest.fixture
def limits(monkeypatch):
    """The limits of memory that were set, on a GPU of 16 contexts."""
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=16 * CONTEXT_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    return limits


def test_shares_leave_room_for_contexts_and_end_with_the_trial(limits):
    for gpus in (0.25, 1, 1 / 16):
        assert device_for(gpus) == torch.device("cuda:0")
    assert limits == [0.25 - 1 / 16, 1.0, 1 / 32]
    assert device_for(0) == torch.device("cpu")
    assert len(limits) == 3


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"placement\.gpus=0\.5.*placement\.gpus=0"):
        device_for(0.5)


def test_advice_when_the_memory_is_out():
    assert "placement.vmap_clients" in error_line(torch.OutOfMemoryError("CUDA out of memory."))
    assert "placement" not in error_line(MemoryError())


def test_errors_after_which_no_kernel_runs():
    assert breaks_device(RuntimeError("CUDA error: device-side assert triggered"))
    assert not breaks_device(RuntimeError("CUDA error: out of memory"))
    assert not breaks_device(torch.OutOfMemoryError("CUDA out of memory."))
    assert not breaks_device(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not breaks_device(ValueError("CUDA error"))
