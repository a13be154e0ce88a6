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

backends = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this version of torch has no backends in Python", allow_module_level=True)

from helpers.run_on_stand_in_device import FINE  # noqa: E402


def outcomes(*groups: str) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-W", "ignore", "-m", "helpers.run_on_stand_in_device", *groups]
    paths = [str(Path(helpers.__path__[0]).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, dict[str, str]]:
    return outcomes("careless", "models", "simulations", "algorithms")


def test_what_forgets_the_device_is_caught(in_one_process):
    found = in_one_process["careless"]
    assert found["is careful"] == FINE
    assert found["adds a tensor of the CPU"].startswith("WrongDevice: aten::mul: a tensor of the CPU (3,)")
    assert found["reads as numpy"].startswith("RuntimeError: .numpy() is not supported")
    assert found["copies a number"].startswith("AssertionError: training waits for the device: ['aten::_to_copy'")


def everything_is_fine(found, least):
    assert len(found) >= least
    assert {name: said for name, said in found.items() if said != FINE} == {}


@pytest.mark.parametrize(("group", "least"), [("algorithms", 50), ("models", 10), ("simulations", 14)])
def test_all_run_there(in_one_process, group, least):
    everything_is_fine(in_one_process[group], least)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "least"), [("algorithms and variants", 90), ("algorithms, 3 at once", 80)])
def test_variants_and_three_clients_at_once_run_there(group, least):
    everything_is_fine(outcomes(group)[group], least)
