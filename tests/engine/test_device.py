"""What a process asks of its GPU, with a CUDA that only answers, and of the C library's allocator."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.federations import blobs, blueprint, new_server
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError, breaks_device, error_line
from rayfed.core.rng import global_state_kept
from rayfed.distributed.host_actor import HostMethods
from rayfed.engine.device import (
    CONTEXT_BYTES,
    _emptiest_gpu,
    check_bf16,
    device_for,
    peak_bytes,
    prefers_channels_last,
    set_kernels,
)
from rayfed.engine.host import Host


@pytest.fixture
def limits(monkeypatch):
    """The limits of memory that were set, on the only GPU, of 16 contexts, without a driver that says their size."""
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=16 * CONTEXT_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**21)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("rayfed.engine.device._run_first_kernels", lambda device: None)
    monkeypatch.setattr("rayfed.engine.device.nvidia_smi", lambda *asked: "")
    return limits


def test_shares_leave_room_for_contexts_and_end_with_the_trial(limits):
    for gpus in (0.25, 1):
        assert device_for(gpus) == torch.device("cuda:0")
    assert limits == [0.25 - 1 / 16, 1.0]
    assert device_for(0) == torch.device("cpu")
    assert len(limits) == 2


def test_a_context_has_the_size_that_the_driver_says(limits, monkeypatch):
    processes = f"1, 300 MiB\n{os.getpid()}, 770 MiB"
    monkeypatch.setattr("rayfed.engine.device.nvidia_smi", lambda *asked: processes if "compute-apps" in asked else "")
    device_for(0.25)
    assert limits == [0.25 - 768 / (16 * 512)]  # two of the 770 are torch's, for tensors


def test_cuda_has_channels_last_in_half_precision_only():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    chosen = [prefers_channels_last(device, bf16=bf16) for device in (cpu, cuda) for bf16 in (False, True)]
    assert chosen == [True, True, False, True]


@pytest.mark.parametrize(
    ("free", "chosen"),
    [((10, 300, 200), 1), ((299, 298, 300), 2), (None, 0)],  # None: without `nvidia-smi`
)
def test_the_emptiest_gpu_is_taken_and_kept(limits, monkeypatch, free, chosen):
    said = [""]
    if free:  # in another order than CUDA's, and with a GPU that this process does not see
        said = ["GPU-hidden, 900 MiB\nGPU-2, {2} MiB\nGPU-1, {1} MiB\nGPU-0, {0} MiB".format(*free)]
    monkeypatch.setattr("rayfed.engine.device.nvidia_smi", lambda fields: said[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    seen = lambda number: SimpleNamespace(total_memory=2**40, uuid=getattr(number, "index", number))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", seen)
    _emptiest_gpu.cache_clear()
    assert device_for(1) == torch.device("cuda", chosen)
    said[0] = "GPU-0, 1 MiB\nGPU-1, 1 MiB\nGPU-2, 1 MiB"
    assert device_for(1) == torch.device("cuda", chosen)
    _emptiest_gpu.cache_clear()


def test_a_share_that_holds_no_context_or_no_model_is_refused(limits):
    said = r"^0\.05 of this GPU is 0\.4 of 8 GiB, but CUDA .* need 0\.5 GiB .* more than 0\.0625, by placement\.gpus"
    with pytest.raises(UsageError, match=said):
        device_for(0.05)
    model = nn.Linear(2**15, 2**12, bias=False, device="meta")  # of half a gigabyte
    with pytest.raises(UsageError, match=r"is 2 of 8 GiB, .* need 2 GiB .* more than 0\.25"):
        device_for(0.25, model)
    assert limits == []
    device_for(0.3, model)
    device_for(1, nn.Linear(2**17, 2**17, device="meta"))  # when it does not fit, CUDA says so
    assert len(limits) == 2


def test_a_host_looks_at_its_share_before_it_takes_up_a_simulation(limits):
    plan = blueprint(FedAvg(), blobs(2))
    with pytest.raises(UsageError, match=r"^0\.02 of this GPU"):
        HostMethods().take_up(plan, blobs(2), 0.02)


def test_cublas_has_its_workspace_where_kernels_are_deterministic(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with global_state_kept():
        set_kernels(deterministic=False, tf32=False)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        set_kernels(deterministic=True, tf32=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_cublas_has_its_workspace_before_the_first_kernel_of_any_trial(limits, monkeypatch):
    """cuBLAS reads it once: a deterministic trial after another one would come too late."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = []
    kernels = lambda device: found.append(os.environ["CUBLAS_WORKSPACE_CONFIG"])  # noqa: E731
    monkeypatch.setattr("rayfed.engine.device._run_first_kernels", kernels)
    device_for(0)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    device_for(0.25)
    assert found == [":4096:8"]


def test_deterministic_kernels_do_not_fill_new_memory():
    of_torch = torch.utils.deterministic
    assert of_torch.fill_uninitialized_memory
    with global_state_kept():
        set_kernels(deterministic=True, tf32=False)
        assert not of_torch.fill_uninitialized_memory
        set_kernels(deterministic=False, tf32=False)
        assert of_torch.fill_uninitialized_memory
        set_kernels(deterministic=True, tf32=False)
    assert of_torch.fill_uninitialized_memory
    with global_state_kept():
        of_torch.fill_uninitialized_memory = False  # as a user may have chosen
        with global_state_kept():
            set_kernels(deterministic=True, tf32=False)
        assert not of_torch.fill_uninitialized_memory


def test_bf16_is_refused_where_a_gpu_would_emulate_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    with pytest.raises(UsageError, match=r"^local\.precision=bf16: Tesla T4 cannot .*; use local\.precision=float32$"):
        check_bf16(torch.device("cuda"))
    people = blobs(2)
    Host(blueprint(FedAvg(), people, bf16=True), people, "cpu")


def test_a_round_has_the_largest_peak_of_its_hosts(monkeypatch):
    peaks = iter([99, 5, 7, 6, 4, 3, 2])  # what a simulation before took, and two rounds of three chunks
    monkeypatch.setattr("rayfed.engine.host.peak_bytes", lambda device: next(peaks))
    monkeypatch.setattr("rayfed.engine.host.CLIENTS_AT_ONCE", 2)
    people = blobs(5)
    plan = blueprint(FedAvg(), people, rounds=2)
    records = [*new_server(plan, people, points=()).run()]
    assert [record.gpu_bytes for record in records] == [7, 4]


def test_peaks_begin_anew(monkeypatch):
    taken = [8, 3]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: taken[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: taken.pop(0))
    gpu = torch.device("cuda:0")
    assert (peak_bytes(gpu), peak_bytes(gpu), peak_bytes(torch.device("cpu"))) == (8, 3, 0)


def test_advice_when_the_memory_is_out():
    assert "placement.vmap_clients" in error_line(torch.OutOfMemoryError("CUDA out of memory."))
    assert "placement" not in error_line(MemoryError())


def test_errors_after_which_no_kernel_runs():
    assert breaks_device(RuntimeError("CUDA error: device-side assert triggered"))
    assert not breaks_device(RuntimeError("CUDA error: out of memory"))
    assert not breaks_device(torch.OutOfMemoryError("CUDA out of memory."))
    assert not breaks_device(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not breaks_device(ValueError("CUDA error"))


FAULTS = """
import resource, sys, torch
from rayfed.engine.device import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def batch():
    held = [torch.ones(6 * 2**18) for _ in range(8)]  # eight tensors of 6 MiB, alive together
for _ in range(3):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_batches_cost_page_faults_once():
    kept, given_back = min(faults("kept") for _ in range(3)), faults("default")  # the system may take pages back
    assert kept < 100
    if given_back < 1000:
        pytest.skip("this system counts no page faults, or its C library keeps freed memory of itself")
    assert given_back > 10 * kept
