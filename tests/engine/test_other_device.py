"""Everything runs where tensors are not on the CPU, with the CPU's results; nothing is forgotten there.

A stand-in for a GPU, for machines that have none: see `stand_in_device`. What it cannot show is CUDA's own: kernels,
memory and speed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import helpers
from helpers.run_on_stand_in_device import FINE


def outcomes(what: str) -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", "-m", "helpers.run_on_stand_in_device", what]
    paths = [str(Path(helpers.__path__[0]).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_forgets_the_device_is_caught():
    found = outcomes("careless")
    assert found["is careful"] == FINE
    assert found["adds a tensor of the CPU"].startswith("WrongDevice: aten::mul: a tensor of the CPU (3,)")
    assert found["reads as numpy"].startswith("RuntimeError: .numpy() is not supported")


@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("algorithms", 90),
        pytest.param("algorithms, 3 at once", 80, marks=pytest.mark.slow),
        ("models", 10),
        ("simulations", 13),
    ],
)
def test_all_run_there(what, least):
    found = outcomes(what)
    assert len(found) >= least
    assert {name: said for name, said in found.items() if said != FINE} == {}
