"""Memory available to this process."""

import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def memory_bytes() -> int:
    """Return the memory of the machine in bytes, or the memory limit of the container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes)
