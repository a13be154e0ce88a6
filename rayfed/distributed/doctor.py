"""Checks of a machine or a cluster: what is there, what is wrong, and what to do about it."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rayfed.core.errors import HostLost, UsageError
from rayfed.core.memory import memory_bytes, nvidia_smi
from rayfed.data.cache import cache_folder
from rayfed.data.readers.files import datasets_folder
from rayfed.experiments.capacity import cluster_is_running, ray_folder
from rayfed.experiments.config import Faults, Placement

_GIB = 2**30
_SHARE_OF_SHM = 0.3  # the share of the memory that Ray takes for its object store
_FULL = 0.95  # the share of the disk from which on Ray refuses to spill objects
_LONGEST_FOLDER = 39  # sockets have paths of at most 107 bytes, of which Ray adds up to 68


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        subject: What was looked at.
        found: What was found, in words.
        remedy: What to do; empty if there is no problem.
    """

    subject: str
    found: str
    remedy: str = ""


def checks(*, with_ray: bool = True, start_seconds: float = Faults.start_seconds) -> Iterator[Check]:
    """Yield the outcome of every check, in the order in which they should be solved.

    Args:
        with_ray: Whether to start Ray, or to join the running cluster.
        start_seconds: How long Ray may take to start.
    """
    steps: list[Callable[[], Iterator[Check]]] = [_versions, _cpus, _memory, _gpus, _data, _folders, _shared_memory]
    for step in steps:
        yield from step()
    if with_ray:
        yield from _ray(start_seconds)


def _versions() -> Iterator[Check]:
    names = ("rayfed-sim", "torch", "torchvision", "ray", "numpy", "pandas", "pyarrow")
    yield Check("Python", platform.python_version())
    yield Check("packages", ", ".join(f"{name} {_version(name)}" for name in names))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpus() -> Iterator[Check]:
    usable = len(os.sched_getaffinity(0))
    yield Check("CPUs", f"{usable} of {os.cpu_count()} are usable")
    limits = {"the container's limit (cgroup)": _cgroup_cpus()}
    if "SLURM_JOB_ID" in os.environ:
        job = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "")
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
        size = "1 node" if nodes == "1" else f"{nodes} nodes"
        yield Check("SLURM", f"job {os.environ['SLURM_JOB_ID']} on {size}, {job or 'unknown'} CPUs for this task")
        limits["SLURM's allocation"] = float(job) if job.isdigit() else None
        if nodes != "1" and not cluster_is_running():
            yield Check(
                "SLURM",
                "the job has several nodes, but no Ray cluster is running",
                "submit the command with the repository's cluster-slurm.sh, which starts one (rayfed docs cluster); "
                "or srun ray start on every node, and set RAY_ADDRESS to the head's address",
            )
    for name, limit in limits.items():
        if limit is not None and limit < usable - 0.5:
            yield Check(
                "CPUs",
                f"{name} is {limit:g} CPUs, but Ray would use {usable}",
                f"ray start --head --num-cpus={max(1, int(limit))}, and then run; or taskset rayfed to as many CPUs",
            )


def _cgroup_cpus() -> float | None:
    """Return the CPUs that the container may use, None without a limit."""
    version2, version1 = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    try:
        if version2.is_file():
            quota, period = version2.read_text().split()
        else:
            quota, period = version1.read_text().strip(), version1.with_name("cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None


def _memory() -> Iterator[Check]:
    yield Check("memory", f"{memory_bytes() / _GIB:.1f} GiB")
    limit = os.environ.get("SLURM_MEM_PER_NODE", "")
    if limit.isdigit() and int(limit) * 2**20 < 0.9 * memory_bytes():
        yield Check(
            "memory",
            f"the SLURM job may use {int(limit) / 1024:.1f} GiB, but Ray would count on {memory_bytes() / _GIB:.1f}",
            f"ray start --head --object-store-memory={int(limit) * 2**20 // 4}, and then run; or request more memory",
        )


def _gpus() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            gpu = f"{number}: {properties.name}, {properties.total_memory / _GIB:.0f} GiB"
            try:
                ones = torch.ones(64, 64, device=f"cuda:{number}")
                computes = float((ones @ ones).sum()) == 64**3
            except RuntimeError as error:
                words = " ".join(str(error).split())[:160]
                yield Check("GPU", f"{gpu}: a test kernel fails ({words})", "see nvidia-smi for who uses it, or reboot")
                continue
            yield Check("GPU", gpu if computes else f"{gpu}: computes wrongly", "" if computes else "do not use it")
        yield from _sharing()
        return
    present = nvidia_smi("name")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not present:
        yield Check("GPU", "none; clients train on CPUs")
    elif hidden is not None and hidden.strip() in ("", "-1"):
        yield Check("GPU", f"{present}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "unset CUDA_VISIBLE_DEVICES")
    elif torch.version.cuda is None:
        yield Check(
            "GPU",
            f"{present}, but torch {torch.__version__} is a build for CPUs",
            "install torch for CUDA; pytorch.org has the command for this system",
        )
    else:
        yield Check(
            "GPU",
            f"{present}, but torch for CUDA {torch.version.cuda} cannot use it",
            "update the NVIDIA driver, or install a torch for the CUDA version that nvidia-smi shows",
        )


def _sharing() -> Iterator[Check]:
    """Yield whether several processes may compute on a GPU, as placement.gpus below 1 needs, and do so at once."""
    modes = set(nvidia_smi("compute_mode").split(", ")) - {"", "Default"}
    if modes - {"Exclusive_Process"}:
        yield Check("GPU", f"compute mode {', '.join(sorted(modes))}: no process computes", "nvidia-smi -c DEFAULT")
        return
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
    if modes and not mps:
        yield Check(
            "GPU",
            "compute mode Exclusive_Process: only one process computes on a GPU",
            "nvidia-smi -c DEFAULT, or nvidia-cuda-mps-control -d; or keep placement.gpus at 1",
        )
    else:
        how = "at once, by MPS" if mps else "in turns; with nvidia-cuda-mps-control -d, they would at once"
        yield Check("GPU", f"processes that share one compute {how}")


def _data() -> Iterator[Check]:
    folder, given = datasets_folder(None), os.environ.get("RAYFED_DATA")
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        yield Check("data", f"{folder}: {shown or 'empty'}")
    elif given:
        yield Check(
            "data", f"RAYFED_DATA={given}: no such folder", "set RAYFED_DATA to the folder that has the datasets"
        )
    else:
        yield Check("data", "RAYFED_DATA is not set; embedded data work, and others with data.root or data.folder")


def _folders() -> Iterator[Check]:
    places = {
        "cache": (cache_folder(), "set RAYFED_CACHE to a folder that you may write to"),
        "temporary": (
            ray_folder().parent,
            "set RAY_TMPDIR to a folder with space",
        ),
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


def _ray(start_seconds: float) -> Iterator[Check]:
    joined = cluster_is_running()
    what = "cluster" if joined else "Ray"
    try:
        import ray

        from rayfed.distributed import cluster

        running = ray.is_initialized()
        cluster.connect(Placement(cpus=0), dashboard=False, start_seconds=start_seconds)
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
    """Yield the outcome for every node: whether a process starts there, and finds the same versions and data."""
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
