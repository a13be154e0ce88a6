"""Checks of a machine or a cluster for what fails most often: versions, Ray, GPUs, folders and shared memory."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rayfed.core.errors import HostLost, UsageError
from rayfed.core.machine import memory_bytes, nvidia_smi
from rayfed.data.readers.files import datasets_folder
from rayfed.experiments.capacity import cluster_is_running, ray_folder
from rayfed.experiments.config import Placement

_PACKAGES = ("rayfed-sim", "torch", "torchvision", "ray", "numpy", "pandas", "pyarrow")
_GIB = 2**30
_SHARE_OF_SHM = 0.3  # the share of the memory that Ray takes for its object store
_FULL = 0.95  # the share of the disk from which on Ray refuses to spill objects


class Check(NamedTuple):
    """The outcome of a check: its subject, what was found, and a remedy, which is empty if there is no problem."""

    subject: str
    found: str
    remedy: str = ""


def checks(*, with_ray: bool = True) -> Iterator[Check]:
    """Yield the outcome of every check in the order in which problems should be solved, that of Ray if asked."""
    yield Check("versions", ", ".join(f"{name} {version}" for name, version in _versions().items()))
    yield from _gpus()
    yield from _folders()
    if (folder := Path("/dev/shm")).is_dir():
        size, wanted = shutil.disk_usage(folder).total / _GIB, _SHARE_OF_SHM * memory_bytes() / _GIB
        remedy = f"docker run --shm-size={max(2, round(wanted))}g; or mount -o remount,size=… /dev/shm"
        found = f"{size:.2f} GiB; Ray would use up to {wanted:.1f} GiB, and else the much slower disk"
        yield Check("/dev/shm", found, remedy if size < min(wanted, 2) else "")
    if with_ray:
        yield from _ray()


def _versions() -> dict[str, str]:
    """Return the versions of Python and of packages in this process."""
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _gpus() -> Iterator[Check]:
    import torch

    for number in range(torch.cuda.device_count()):
        found, remedy = f"{number}: {torch.cuda.get_device_name(number)}", ""
        try:
            ones = torch.ones(64, 64, device=f"cuda:{number}")
            if float((ones @ ones).sum()) != 64**3:
                remedy = "do not use it: it computes wrongly"
        except RuntimeError as error:
            found += f": a test kernel fails ({_words(error)})"
            remedy = "see nvidia-smi for who uses it, or reboot"
        yield Check("GPU", found, remedy)
    if not torch.cuda.device_count() and (present := nvidia_smi("name")):
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        remedy = "unset CUDA_VISIBLE_DEVICES, install torch for CUDA, or update the NVIDIA driver"
        names = ", ".join(present.splitlines())
        yield Check("GPU", f"{names}, but torch {torch.__version__} for {build} cannot use it", remedy)
    elif not torch.cuda.device_count():
        yield Check("GPU", "none; clients train on CPUs")


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _folders() -> Iterator[Check]:
    data, given = datasets_folder(None), os.environ.get("RAYFED_DATA")
    if given and not data.is_dir():
        remedy = "set RAYFED_DATA to the folder that has the datasets"
        yield Check("data", f"RAYFED_DATA={given}: no such folder", remedy)
    else:
        yield Check("data", str(data) if data.is_dir() else "RAYFED_DATA is not set; embedded data work")
    for name, folder, remedy in (
        ("temporary", ray_folder().parent, "set RAY_TMPDIR to a folder with space"),
        ("results", Path.cwd(), "change to a folder that you may write to, or give results=FOLDER"),
    ):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        usage = shutil.disk_usage(existing)
        full = usage.used / usage.total > _FULL
        if not os.access(existing, os.W_OK):
            yield Check(name, f"{folder}: cannot be written", remedy)
        else:
            found = f"{folder}: {usage.free / _GIB:.1f} GiB free, {usage.used / usage.total:.0%} used"
            yield Check(name, found, f"free some space, or {remedy}" if full else "")


def _ray() -> Iterator[Check]:
    joined = cluster_is_running()
    what = "cluster" if joined else "Ray"
    try:
        import ray

        from rayfed.distributed import cluster

        cluster.connect(Placement(cpus=0), dashboard=False)
    except (HostLost, UsageError, ImportError) as error:
        remedy = "ray status shows the cluster; unset RAY_ADDRESS or run ray stop to do without it"
        yield Check(what, str(error), remedy if joined else "see the logs; placement.hosts=0 works without Ray")
        return
    amounts = ray.cluster_resources()
    resources = f"{amounts.get('CPU', 0):g} CPU, {amounts.get('GPU', 0):g} GPU"
    yield Check(what, f"{'joined' if joined else 'starts'}: {resources}")
    yield from _nodes()
    ray.shutdown()


def _nodes() -> Iterator[Check]:
    """Yield for every node whether a process starts there, and finds the same versions."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, here, calls = ray.remote(_versions), _versions(), {}
    for node in [node for node in ray.nodes() if node["Alive"]]:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[node["NodeManagerAddress"]] = task.options(num_cpus=0, scheduling_strategy=there).remote()
    for address, call in calls.items():
        try:
            found = ray.get(call, timeout=120)
        except ray.exceptions.RayError as error:
            remedy = "install rayfed in the same way on it"
            yield Check("node", f"{address}: no process can start ({_words(error)})", remedy)
            continue
        different = [
            f"{name} {found[name]} (here {version})" for name, version in here.items() if found[name] != version
        ]
        remedy = "install the same versions on all nodes" if different else ""
        yield Check("node", f"{address}: {', '.join(different) or 'ready'}", remedy)
