"""Freed memory stays with the process: later batches of the same size cost no page faults."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from rayfed.engine.device import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def batch():
    held = [torch.ones(6 * 2**18) for _ in range(8)]  # eight tensors of 6 MiB, alive together
for _ in range(3):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_batches_cost_page_faults_once():
    kept, given_back = faults("kept"), faults("default")
    assert kept < 100
    if given_back < 1000:
        pytest.skip("this system counts no page faults, or its C library keeps freed memory of itself")
    assert given_back > 10 * kept
