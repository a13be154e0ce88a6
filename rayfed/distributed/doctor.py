"""Checks of a machine or a cluster for what fails most often: versions, Ray, GPUs, folders and shared memory."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayfed.core.errors import HostLost, UsageError
from rayfed.core.machine import memory_bytes, nvidia_smi
from rayfed.data.readers.files import datasets_folder
from rayfed.experiments.capacity import cluster_is_running, ray_folder
from rayfed.experiments.config import Placement

_GIB = 2**30
_SHARE_OF_SHM = 0.3  # the share of the memory that Ray takes for its object store
_FULL = 0.95  # the share of the disk from which on Ray refuses to spill objects
_LONGEST_FOLDER = 39  # sockets have paths of at most 107 bytes, of which Ray adds up to 68


@dataclass(frozen=True)
class Check:
    """The outcome of a check: its subject, what was found, and a remedy, which is empty if there is no problem."""

    subject: str
    found: str
    remedy: str = ""


def checks(*, with_ray: bool = True) -> Iterator[Check]:
    """Yield the outcome of every check in the order in which problems should be solved, that of Ray if asked."""
    names = ("rayfed-sim", "torch", "torchvision", "ray", "numpy", "pandas", "pyarrow")
    yield Check("Python", platform.python_version())
    yield Check("packages", ", ".join(f"{name} {_version(name)}" for name in names))
    yield from _gpus()
    yield from _folders()
    yield from _shared_memory()
    if with_ray:
        yield from _ray()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> Iterator[Check]:
    import torch

    for number in range(torch.cuda.device_count()):
        gpu = f"{number}: {torch.cuda.get_device_name(number)}"
        try:
            ones = torch.ones(64, 64, device=f"cuda:{number}")
            computes = float((ones @ ones).sum()) == 64**3
        except RuntimeError as error:
            words = " ".join(str(error).split())[:160]
            yield Check("GPU", f"{gpu}: a test kernel fails ({words})", "see nvidia-smi for who uses it, or reboot")
        else:
            yield Check("GPU", gpu if computes else f"{gpu}: computes wrongly", "" if computes else "do not use it")
    if not torch.cuda.device_count():
        if present := nvidia_smi("name"):
            build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
            remedy = "unset CUDA_VISIBLE_DEVICES, install torch for CUDA, or update the NVIDIA driver"
            yield Check("GPU", f"{present}, but torch {torch.__version__} for {build} cannot use it", remedy)
        else:
            yield Check("GPU", "none; clients train on CPUs")


def _folders() -> Iterator[Check]:
    data, given = datasets_folder(None), os.environ.get("RAYFED_DATA")
    if given and not data.is_dir():
        remedy = "set RAYFED_DATA to the folder that has the datasets"
        yield Check("data", f"RAYFED_DATA={given}: no such folder", remedy)
    else:
        yield Check("data", str(data) if data.is_dir() else "RAYFED_DATA is not set; embedded data work")
    places = {
        "temporary": (ray_folder().parent, "set RAY_TMPDIR to a folder with space"),
        "results": (Path.cwd(), "change to a folder that you may write to, or give results=FOLDER"),
    }
    for name, (folder, remedy) in places.items():
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        usage = shutil.disk_usage(existing)
        free = f"{folder}: {usage.free / _GIB:.1f} GiB free"
        if not os.access(existing, os.W_OK):
            yield Check(name, f"{folder}: cannot be written", remedy)
        elif usage.used / usage.total > _FULL:
            yield Check(name, f"{free}, {usage.used / usage.total:.0%} used", f"free some space, or {remedy}")
        elif name == "temporary" and len(os.fsencode(folder)) > _LONGEST_FOLDER:
            yield Check(name, f"{folder}: too long for the sockets of Ray", "set RAY_TMPDIR to a short path")
        else:
            yield Check(name, free)


def _shared_memory() -> Iterator[Check]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Check("/dev/shm", "none; Ray uses files on the disk")
        return
    size, wanted = shutil.disk_usage(folder).total, _SHARE_OF_SHM * memory_bytes()
    if size < min(wanted, 2 * _GIB):
        yield Check(
            "/dev/shm",
            f"{size / _GIB:.2f} GiB; Ray would use up to {wanted / _GIB:.1f} GiB, and else the much slower disk",
            f"docker run --shm-size={max(2, round(wanted / _GIB))}g; or mount -o remount,size=… /dev/shm",
        )
    else:
        yield Check("/dev/shm", f"{size / _GIB:.1f} GiB")


def _ray() -> Iterator[Check]:
    joined = cluster_is_running()
    what = "cluster" if joined else "Ray"
    try:
        import ray

        from rayfed.distributed import cluster

        running = ray.is_initialized()
        cluster.connect(Placement(cpus=0), dashboard=False)
    except (HostLost, UsageError, ImportError) as error:
        remedy = "ray status shows the cluster; unset RAY_ADDRESS or run ray stop to do without it"
        yield Check(what, str(error), remedy if joined else "see the logs; placement.hosts=0 works without Ray")
        return
    try:
        yield Check(what, f"{'joined' if joined else 'starts'}: {_resources(ray.cluster_resources())}")
        yield from _nodes(joined)
    finally:
        if not running:
            ray.shutdown()


def _resources(amounts: dict[str, float]) -> str:
    return f"{amounts.get('CPU', 0):g} CPU, {amounts.get('GPU', 0):g} GPU, {amounts.get('memory', 0) / _GIB:.1f} GiB"


def _nodes(joined: bool) -> Iterator[Check]:
    """Yield for every node whether a process starts there, and finds the same versions and data."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(_node)
    here, data = _node(""), str(datasets_folder(None)) if os.environ.get("RAYFED_DATA") else ""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    calls = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[node["NodeManagerAddress"]] = task.options(num_cpus=0, scheduling_strategy=there).remote(data)
    gpus: dict[str, str] = {}
    for address, call in calls.items():
        try:
            found = ray.get(call, timeout=120)
        except ray.exceptions.RayError as error:
            words = " ".join(str(error).split())[:160]
            yield Check("node", f"{address}: no process can start ({words})", "install rayfed in the same way on it")
            continue
        gpus[address] = found.pop("gpus")
        different = {name: version for name, version in found.items() if name != "data" and version != here[name]}
        if different:
            names = ", ".join(f"{name} {version} (here {here[name]})" for name, version in different.items())
            yield Check("node", f"{address}: {names}", "install the same versions on all nodes")
        elif data and not found["data"]:
            yield Check("node", f"{address}: ready; data larger than a quarter of its memory need {data} there, too")
        elif joined:
            yield Check("node", f"{address}: ready")
    if len(kinds := {kind for of_node in gpus.values() for kind in of_node.split(", ") if kind}) > 1:
        yield Check("GPUs", f"of several types ({', '.join(sorted(kinds))}): results differ by rounding between them")


def _node(data: str) -> dict[str, str]:
    """Return the versions and the GPUs that a process finds, and whether the folder `data` is there."""
    names = {"rayfed": "rayfed-sim", "torch": "torch", "numpy": "numpy"}
    versions = {name: _version(package) for name, package in names.items()}
    python = ".".join(map(str, sys.version_info[:2]))
    there = "there" if data and Path(data).is_dir() else ""
    return {"Python": python, **versions, "data": there, "gpus": nvidia_smi("name")}
