"""Sweeps in this process, one trial after the other: failures, resuming, Ctrl-C, and Ray that does not start."""

import sys
import types

import pandas as pd
import pytest

import rayfed
import rayfed.distributed
from helpers.commands import TWO_CLIENTS, command
from rayfed import launch
from rayfed.core.errors import RayNotStarted

main = command("sweep")

SPACE = """
experiment: local
seeds: [0, 1]
rounds: 2
data: {domains: [plain, font], per_domain: 60}
model: {name: mlp, hidden: [8]}
local: {batch_size: 8, lr: 0.1}
search: {max_concurrent: 1}
arms:
  - algorithm.name: fedavg
  - algorithm.name: scaffold
    local.lr: 1.0e+30
"""

BROKEN = """
from dataclasses import dataclass
from rayfed.metrics.base import OfPredictions

@dataclass(frozen=True, kw_only=True)
class Mine(OfPredictions):
    def measure(self, logits, y):
        raise ZeroDivisionError('mine')
"""


@pytest.fixture
def here(here):
    (here / "space.yaml").write_text(SPACE)
    return here


def trials():
    return pd.read_parquet("results/local/trials").set_index("trial")


class TestCommand:
    def test_failures_are_recorded_and_the_others_go_on(self, here, capsys):
        before = set(sys.modules)
        assert main(["space.yaml"]) == 1
        out, err = capsys.readouterr()
        assert "ray" not in set(sys.modules) - before
        assert sorted(trials()["status"]) == ["diverged", "diverged", "done", "done"]
        assert "4 trials: configurations fedavg 1, scaffold 1; each with 2 seeds" in err
        assert "4 trials in " in err
        assert "Not finished: scaffold-seed0" in out
        assert (here / "results/local/curves.png").exists()
        result = rayfed.run(TWO_CLIENTS, rounds=2)  # of the same configuration
        assert trials().loc[result.trial, "weights_hash"] == result.weights_hash

    def test_failed_trials_are_told_once_and_run_again_when_resumed(self, here, capsys):
        mine = here / "failing_metric.py"
        mine.write_text(BROKEN)
        space = ["space.yaml", "arms=[{}]", "metrics={'failing_metric:Mine': true}"]
        assert main(space) == 1
        err = capsys.readouterr().err
        assert err.count("failed: ZeroDivisionError: mine (failing_metric.py, line 8, in measure); the full trace") == 1
        assert trials()["status"].tolist() == ["failed"] * 2
        (first, _) = (here / "results/local/tracebacks").iterdir()
        assert "ZeroDivisionError: mine" in first.read_text()
        mine.write_text(BROKEN.replace("raise ZeroDivisionError('mine')", "return []"))
        del sys.modules["failing_metric"]
        assert main([*space, "resume=true"]) == 0
        assert trials()["status"].tolist() == ["done"] * 2
        assert not list((here / "results/local/tracebacks").iterdir())

    def test_it_stops_when_the_gpu_fails(self, here, capsys):
        (here / "local_gpu.py").write_text(BROKEN.replace("ZeroDivisionError('mine')", "RuntimeError('CUDA error: x')"))
        assert main(["space.yaml", "metrics={'local_gpu:Mine': true}"]) == 1
        assert "stopped, since the GPU fails" in capsys.readouterr().err
        assert trials()["status"].tolist() == ["failed"]

    def test_an_interrupt_ends_it_with_how_to_continue(self, here, capsys, monkeypatch):
        calls = []

        def interrupted(*given, **more):
            calls.append(given)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return run_trial(*given, **more)

        run_trial = launch.run_here
        monkeypatch.setattr(launch, "run_here", interrupted)
        assert main(["space.yaml", "arms=[{}]"]) == 130
        assert "interrupted after 1 of 2 trials; the same command with resume=true continues" in capsys.readouterr().err

    def test_a_file_that_is_missing_in_one_trial_fails_this_trial(self, here, monkeypatch):
        plans = []

        def planned(job, *given, **more):
            plans.append(job)
            if len(plans) == 1:
                raise rayfed.UsageError("data.file=x: no such file")
            return real(job, *given, **more)

        real = launch.planned
        monkeypatch.setattr(launch, "planned", planned)
        assert main(["space.yaml", "arms=[{}]"]) == 1
        rows = trials()
        assert rows.loc[plans[0]["trial"], "error"] == "UsageError: data.file=x: no such file"
        assert rows.loc[plans[1]["trial"], "status"] == "done"


class TestRayThatDoesNotStart:
    @pytest.fixture
    def no_ray(self, monkeypatch):
        def run_sweep(plan, *, quiet):
            raise RayNotStarted("Ray did not start (no space); its logs are in /tmp/x")

        driver = types.ModuleType("rayfed.distributed.tune")
        driver.run_sweep = run_sweep
        monkeypatch.setitem(sys.modules, "rayfed.distributed.tune", driver)
        monkeypatch.setattr(rayfed.distributed, "tune", driver, raising=False)

    def test_the_trials_run_here(self, here, no_ray, capsys):
        assert main(["space.yaml", "arms=[{}]", "search.max_concurrent=2"]) == 0
        err = capsys.readouterr().err
        assert "note: Ray did not start (no space); its logs are in /tmp/x; the trials run one after the other" in err
        assert trials()["status"].tolist() == ["done", "done"]

    @pytest.mark.parametrize("given", [["placement.hosts=1"], ["search={scheduler: asha, max_concurrent: 1}"]])
    def test_what_needs_ray_ends_in_a_line(self, here, no_ray, capsys, given):
        assert main(["space.yaml", "arms=[{}]", *given]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            "rayfed: Ray did not start (no space); its logs are in /tmp/x"
        )
