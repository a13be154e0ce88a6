"""`rayfed doctor`: every problem has a remedy and exit code 1. What is looked at is put in place by the tests."""

import importlib.metadata
import os
import types

import pytest
import torch

from helpers.commands import command
from rayfed.core.errors import HostLost
from rayfed.distributed import cluster, doctor
from rayfed.experiments import machine_checks

main = command("doctor")


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """A machine without a job, a container or a cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RAYFED_", "RAY_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_checks, "nvidia_smi", lambda field: "")
    monkeypatch.setattr(doctor, "cluster_is_running", lambda: False)
    usage = types.SimpleNamespace(total=100 * 2**30, used=10 * 2**30, free=90 * 2**30)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage)


def test_a_machine_without_problems(capsys):
    assert main(["--no-ray"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("no problem found\n")
    assert f"torch {importlib.metadata.version('torch')}" in out
    assert max(map(len, out.splitlines())) <= 120


class TestProblems:
    def one(self, capsys, *words):
        assert main(["--no-ray"]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert out.endswith("1 problem found")
        assert out.count("remedy: ") == 1
        assert [word for word in words if word not in out] == []

    def test_a_data_folder_that_does_not_exist(self, capsys, monkeypatch):
        monkeypatch.setenv("RAYFED_DATA", "/nowhere/data")
        self.one(capsys, "RAYFED_DATA=/nowhere/data: no such folder", "set RAYFED_DATA to the folder")

    @pytest.mark.parametrize(
        ("folder", "total", "used", "words"),
        [
            ("/dev/shm", 64 * 2**20, 0, ("/dev/shm 0.06 GiB", "--shm-size=19g")),
            ("/tmp", 100 * 2**30, 97 * 2**30, ("3.0 GiB free, 97% used", "RAY_TMPDIR")),
        ],
    )
    def test_little_room(self, capsys, monkeypatch, folder, total, used, words):
        def usage(path):
            size, taken = (total, used) if str(path) == folder else (100 * 2**30, 0)
            return types.SimpleNamespace(total=size, used=taken, free=size - taken)

        monkeypatch.setattr(machine_checks.shutil, "disk_usage", usage)
        monkeypatch.setattr(machine_checks, "memory_bytes", lambda: 64 * 2**30)
        self.one(capsys, *words)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU")
    def test_a_gpu_that_torch_cannot_use(self, capsys, monkeypatch):
        monkeypatch.setattr(machine_checks, "nvidia_smi", lambda field: "NVIDIA H100")
        monkeypatch.setattr(torch.version, "cuda", None)
        self.one(capsys, "NVIDIA H100, but torch", "for CPUs cannot use it", "install torch for CUDA")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose kernels run on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    for name, value in {"device_count": 1, "get_device_name": "NVIDIA H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)


def test_a_gpu_computes_or_fails(capsys, gpu, monkeypatch):
    assert main(["--no-ray"]) == 0
    assert "0: NVIDIA H100" in capsys.readouterr().out

    def ones(*size, device):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", ones)
    assert main(["--no-ray"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "0: NVIDIA H100: a test kernel fails (CUDA error: no kernel image" in said


class TestRay:
    @pytest.mark.parametrize(("joined", "words"), [(False, "Ray did not start"), (True, "cluster")])
    def test_that_does_not_start(self, capsys, monkeypatch, joined, words):
        def connect(*given, **more):
            raise HostLost("Ray did not start (x); its logs are in /tmp/y")

        monkeypatch.setattr(cluster, "connect", connect)
        monkeypatch.setattr(doctor, "cluster_is_running", lambda: joined)
        assert main([]) == 1
        out = capsys.readouterr().out
        assert words in out
        assert ("unset RAY_ADDRESS" in out) == joined

    @pytest.mark.ray
    @pytest.mark.slow
    def test_that_starts(self, capsys):
        main([])
        assert "ok       Ray         starts: " in capsys.readouterr().out
