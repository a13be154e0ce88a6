"""A process that waits for what does not come, and one that only waits for long."""

import subprocess
import sys

import pytest

# The main thread does something, while another one looks until it has seen it move, or as often as it is told.
_PROGRAM = """
import _thread, subprocess, sys, threading, time
from rayfed.distributed.activity import Activity

seen, activity, looked = [], Activity(), threading.Event()

def look():
    activity.moved()
    time.sleep(0.1)  # until the other thread has begun to wait
    activity.moved()
    while len(seen) < int(sys.argv[1]) and not any(seen):
        time.sleep(0.1)
        seen.append(activity.moved())
    looked.set()

threading.Thread(target=look).start()
{does}
looked.wait()
print(any(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
@pytest.mark.parametrize(
    ("does", "moves"),
    [
        ("looked.wait()", False),
        ("while not looked.is_set(): pass", True),
        ("while not looked.wait(0.02): pass", True),
        ("subprocess.run(['sleep', '3'])", True),
        # a thread that Python's list does not have, like those of a library
        ("_thread.start_new_thread(lambda: [sum(range(1000)) for _ in iter(looked.is_set, True)], ())", True),
        ("threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(looked.is_set, True)]).start()", True),
    ],
    ids=["lock", "computing", "polling", "other process", "library's thread", "other thread"],
)
def test_moved(does, moves):
    looks = 100 if moves else 3  # a busy machine may let a thread wait
    command = [sys.executable, "-c", _PROGRAM.format(does=does), str(looks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(moves)]
