"""How much memory there is for this process."""

import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def memory_bytes() -> int:
    """The machine's memory, or the container's share of it where that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            found.append(int(text))
    return min(found)
