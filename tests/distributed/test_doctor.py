"""`rayfed doctor`: every problem has a remedy and exit code 1. What is looked at is put in place by the tests."""

import importlib.metadata
import os
import types

import pytest
import torch

from helpers.commands import command
from rayfed.distributed import cluster, doctor

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
    monkeypatch.setattr(doctor, "nvidia_smi", lambda field: "")
    monkeypatch.setattr(doctor, "cluster_is_running", lambda: False)
    usage = types.SimpleNamespace(total=100 * 2**30, used=10 * 2**30, free=90 * 2**30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)


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

    def test_little_shared_memory(self, capsys, monkeypatch):
        sizes = {"/dev/shm": 64 * 2**20}

        def usage(path):
            total = sizes.get(str(path), 100 * 2**30)
            return types.SimpleNamespace(total=total, used=0, free=total)

        monkeypatch.setattr(doctor.shutil, "disk_usage", usage)
        monkeypatch.setattr(doctor, "memory_bytes", lambda: 64 * 2**30)
        self.one(capsys, "/dev/shm 0.06 GiB", "--shm-size=19g")

    def test_a_full_disk(self, capsys, monkeypatch):
        def usage(path):
            full = str(path) == "/tmp"
            return types.SimpleNamespace(total=100 * 2**30, used=(97 if full else 10) * 2**30, free=3 * 2**30)

        monkeypatch.setattr(doctor.shutil, "disk_usage", usage)
        self.one(capsys, "3.0 GiB free, 97% used", "RAY_TMPDIR")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU")
    def test_a_gpu_that_torch_cannot_use(self, capsys, monkeypatch):
        monkeypatch.setattr(doctor, "nvidia_smi", lambda field: "NVIDIA H100")
        monkeypatch.setattr(torch.version, "cuda", None)
        self.one(capsys, "NVIDIA H100, but torch", "for CPUs cannot use it", "install torch for CUDA")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose kernels run on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    for name, value in {"device_count": 1, "get_device_name": "NVIDIA H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)


class TestGPUs:
    def test_one_that_computes(self, capsys, gpu):
        assert main(["--no-ray"]) == 0
        assert "0: NVIDIA H100" in capsys.readouterr().out

    def test_one_that_fails(self, capsys, gpu, monkeypatch):
        def ones(*size, device):
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

        monkeypatch.setattr(torch, "ones", ones)
        assert main(["--no-ray"]) == 1
        assert "0: NVIDIA H100: a test kernel fails (CUDA error: no kernel image" in " ".join(
            capsys.readouterr().out.split()
        )


class TestRay:
    @pytest.mark.parametrize(("joined", "words"), [(False, "Ray did not start"), (True, "cluster")])
    def test_that_does_not_start(self, capsys, monkeypatch, joined, words):
        def connect(*given, **more):
            raise doctor.HostLost("Ray did not start (x); its logs are in /tmp/y")

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
