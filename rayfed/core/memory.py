"""Memory available to this process, and what the driver of GPUs says."""

import os
import subprocess
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def memory_bytes() -> int:
    """Return the memory of the machine in bytes, or the memory limit of the container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes)


def nvidia_smi(field: str) -> str:
    """Return a field of each GPU that the driver knows, "" without any."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(done.stdout.split("\n")).strip(", ") if done.returncode == 0 else ""
