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
    if (folder := Path("/dev/shm")).is_dir():
        size, wanted = shutil.disk_usage(folder).total / _GIB, _SHARE_OF_SHM * memory_bytes() / _GIB
        remedy = f"docker run --shm-size={max(2, round(wanted))}g; or mount -o remount,size=… /dev/shm"
        found = f"{size:.2f} GiB; Ray would use up to {wanted:.1f} GiB, and else the much slower disk"
        yield Check("/dev/shm", found, remedy if size < min(wanted, 2) else "")


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of packages in this process."""
    return {name: version or "not installed" for name, version in versions(*_PACKAGES).items()}


def _gpus() -> Iterator[Check]:
    import torch

    for number in range(torch.cuda.device_count()):
        found, remedy = f"{number}: {torch.cuda.get_device_name(number)}", ""
        try:
            ones = torch.ones(64, 64, device=f"cuda:{number}")
            if float((ones @ ones).sum()) != 64**3:
                remedy = "do not use it: it computes wrongly"
        except RuntimeError as error:
            found += f": a test kernel fails ({one_line(error):.160})"
            remedy = "see nvidia-smi for who uses it, or reboot"
        yield Check("GPU", found, remedy)
    if not torch.cuda.device_count() and (present := nvidia_smi("name")):
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        remedy = "unset CUDA_VISIBLE_DEVICES, install torch for CUDA, or update the NVIDIA driver"
        names = ", ".join(present.splitlines())
        yield Check("GPU", f"{names}, but torch {torch.__version__} for {build} cannot use it", remedy)
    elif not torch.cuda.device_count():
        yield Check("GPU", "none; clients train on CPUs")


def _folders() -> Iterator[Check]:
    data, given = datasets_folder(None), os.environ.get("RAYFED_DATA")
    if given and not data.is_dir():
        remedy = "set RAYFED_DATA to the folder that has the datasets"
        yield Check("data", f"RAYFED_DATA={given}: no such folder", remedy)
    else:
        yield Check("data", str(data) if data.is_dir() else "RAYFED_DATA is not set; embedded data work")
    for name, folder, remedy in (
        ("temporary", temporary_folder(), "set RAY_TMPDIR to a folder with space"),
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
