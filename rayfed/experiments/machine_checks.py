"""Checks of this machine for what fails most often: versions, GPUs, folders and shared memory."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rayfed.core.errors import one_line
from rayfed.core.machine import memory_bytes, nvidia_smi, versions
from rayfed.data.readers.files import datasets_folder
from rayfed.experiments.session_folder import temporary_folder

_PACKAGES = ("rayfed-sim", "torch", "torchvision", "ray", "numpy", "pandas", "pyarrow")
_GIB = 2**30
_SHARE_OF_SHM = 0.3  # the share of the memory that Ray takes for its object store
_FULL = 0.95  # the share of the disk from which on Ray refuses to spill objects


class Check(NamedTuple):
    """The outcome of a check: its subject, what was found, and a remedy, which is empty if there is no problem."""

    subject: str
    found: str
    remedy: str = ""


def machine_checks() -> Iterator[Check]:
    """Yield the outcome of every check in the order in which problems should be solved."""
    yield Check("versions", ", ".join(f"{name} {version}" for name, version in package_versions().items()))
    yield from _gpus()
    yield from _folders()
    if Path("/dev/shm").is_dir():
        yield _shared_memory()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of packages in this process."""
    return {name: version or "not installed" for name, version in versions(*_PACKAGES).items()}


def _gpus() -> Iterator[Check]:
    import torch

    count = torch.cuda.device_count()
    for number in range(count):
        yield _gpu(number)
    if count == 0:
        present = nvidia_smi("name")
        if present:
            yield _unusable_gpus(present.splitlines())
        else:
            yield Check("GPU", "none; clients train on CPUs")


def _gpu(number: int) -> Check:
    """Return whether a GPU computes a product as it should."""
    import torch

    found = f"{number}: {torch.cuda.get_device_name(number)}"
    remedy = ""
    try:
        ones = torch.ones(64, 64, device=f"cuda:{number}")
        if float((ones @ ones).sum()) != 64**3:
            remedy = "do not use it: it computes wrongly"
    except RuntimeError as error:
        found += f": a test kernel fails ({one_line(error):.160})"
        remedy = "see nvidia-smi for who uses it, or reboot"
    return Check("GPU", found, remedy)


def _unusable_gpus(names: list[str]) -> Check:
    """Return what to do about GPUs that the driver has and torch does not find."""
    import torch

    build = "CPUs"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    found = f"{', '.join(names)}, but torch {torch.__version__} for {build} cannot use it"
    return Check("GPU", found, "unset CUDA_VISIBLE_DEVICES, install torch for CUDA, or update the NVIDIA driver")


def _folders() -> Iterator[Check]:
    yield _data_folder()
    yield _writable("temporary", temporary_folder(), "set RAY_TMPDIR to a folder with space")
    yield _writable("results", Path.cwd(), "change to a folder that you may write to, or give results=FOLDER")


def _data_folder() -> Check:
    folder = datasets_folder(None)
    if folder.is_dir():
        return Check("data", str(folder))
    given = os.environ.get("RAYFED_DATA")
    if given:
        remedy = "set RAYFED_DATA to the folder that has the datasets"
        return Check("data", f"RAYFED_DATA={given}: no such folder", remedy)
    return Check("data", "RAYFED_DATA is not set; embedded data work")


def _writable(name: str, folder: Path, remedy: str) -> Check:
    """Return whether a folder, or the nearest one above it that exists, can be written and has space."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Check(name, f"{folder}: cannot be written", remedy)
    usage = shutil.disk_usage(existing)
    share = usage.used / usage.total
    found = f"{folder}: {usage.free / _GIB:.1f} GiB free, {share:.0%} used"
    if share > _FULL:
        return Check(name, found, f"free some space, or {remedy}")
    return Check(name, found)


def _shared_memory() -> Check:
    size = shutil.disk_usage("/dev/shm").total / _GIB
    wanted = _SHARE_OF_SHM * memory_bytes() / _GIB
    found = f"{size:.2f} GiB; Ray would use up to {wanted:.1f} GiB, and else the much slower disk"
    if size >= min(wanted, 2):
        return Check("/dev/shm", found)
    remedy = f"docker run --shm-size={max(2, round(wanted))}g; or mount -o remount,size=… /dev/shm"
    return Check("/dev/shm", found, remedy)
