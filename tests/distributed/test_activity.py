"""A process that waits for what does not come, and one that only waits for long."""

import subprocess
import sys

import pytest

# The main thread does something, while another one looks three times.
_PROGRAM = """
import subprocess, sys, threading, time
from rayfed.distributed.activity import Activity

seen, activity, looked = [], Activity(), threading.Event()

def look():
    activity.moved()
    time.sleep(0.1)  # until the other thread has begun to wait
    activity.moved()
    for _ in range(3):
        time.sleep(0.1)
        seen.append(activity.moved())
    looked.set()

threading.Thread(target=look).start()
{does}
looked.wait()
print(*seen)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
@pytest.mark.parametrize(
    ("does", "moves"),
    [
        ("looked.wait()", False),
        ("while not looked.is_set(): pass", True),
        ("while not looked.wait(0.02): pass", True),
        ("subprocess.run(['sleep', '1'])", True),
        ("threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(looked.is_set, True)]).start()", True),
    ],
    ids=["lock", "computing", "polling", "other process", "other thread"],
)
def test_moved(does, moves):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(does=does)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [str(moves)] * 3
