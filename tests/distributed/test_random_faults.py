"""Processes of runs and sweeps are killed or stopped at random moments; the benchmark `faults.py` on a few of them."""

import importlib
import random
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize(
    "which", ["run host SIGKILL", "run host SIGSTOP", "run server", "run recorder", "run driver", "sweep trial"]
)
def test_a_random_fault_changes_nothing(which, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    faults = importlib.import_module("faults")
    seed = random.randrange(10_000)
    algorithm = random.Random(seed).choice(faults.ALGORITHMS)
    command, victim, *_ = which.split()
    wrong = faults.main(["--faults", "40", "--seed", str(seed), "--only", f"{algorithm} {which}"])
    out = capsys.readouterr().out
    assert not wrong, f"seed {seed}:\n{out}"
    assert f"{algorithm} " in out
    assert f"{command} " in out
    assert victim in out
