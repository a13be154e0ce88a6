"""A sweep over Ray Tune: all arms and seeds, trials that go wrong, resuming, early stopping, and refusals.

A trial takes seconds to start (a process, the import of torch), so one sweep serves many tests.
"""

import contextlib
import io
from typing import NamedTuple

import pandas as pd
import pytest
import torch
import yaml

import rayfed
from helpers.commands import command
from helpers.federations import as_mappings, blobs
from helpers.ray_session import start_ray

main = command("sweep")

pytestmark = pytest.mark.ray

COMMON = """
data: {domains: [plain, font], per_domain: 60}
model: {name: mlp, hidden: [8]}
local: {batch_size: 8, lr: 0.1}
"""

MINE = """
import os
import sys
from dataclasses import dataclass

import torch
from rayfed import option
from rayfed.algorithms.fedavg import FedAvg

@dataclass(frozen=True, kw_only=True)
class Breaking(FedAvg):
    breaks: str = option("never", choices=("never", "once", "always"), help="when the GPU fails for the process")

    def finish(self, ctx, work, client, down, data):
        once = self.breaks == "once" and ctx.round == 2 and not os.path.exists("broken")
        if once:
            open("broken", "w").close()
        if once or self.breaks == "always" or "NO_GPU" in os.environ:
            os.environ["NO_GPU"] = "1"
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().finish(ctx, work, client, down, data)

@dataclass(frozen=True, kw_only=True)
class BreakingServer(FedAvg):
    def aggregate(self, ctx, server, replies):
        if ctx.round == 2 and not os.path.exists("broken_server"):
            open("broken_server", "w").close()
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().aggregate(ctx, server, replies)

ray = sys.modules.get("ray")
if ray is not None and ray._private.worker.global_worker.mode == ray.WORKER_MODE:  # Ray only counts the GPUs
    import rayfed.distributed.server_trials
    rayfed.distributed.server_trials.device_for = lambda gpus, model: torch.device("cpu")

@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    def finish(self, ctx, work, client, down, data):
        if ctx.round == 2:
            raise ZeroDivisionError("my own mistake")
        return super().finish(ctx, work, client, down, data)

    def notes(self, ctx, setting):
        return (f"goes wrong in round 2 of {setting.rounds}",)
"""

SPACE = f"""
experiment: sweep
seeds: [0, 1]
rounds: 3
{COMMON}
arms:
  - algorithm.name: fedavg
  - algorithm.name: sweep_mine:Failing
  - algorithm.name: scaffold
    local.lr: 1.0e+30
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working directory with the user's files, and Ray."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep_mine.py").write_text(MINE)
    (folder / "space.yaml").write_text(SPACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        start_ray()
        yield folder


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    metrics: pd.DataFrame
    rounds: pd.DataFrame
    trials: pd.DataFrame


def ran(capsys, *arguments, experiment="sweep"):
    capsys.readouterr()
    code = main([*arguments])
    out, err = capsys.readouterr()
    home = f"results/{experiment}"
    return Ran(code, out, err, *(pd.read_parquet(f"{home}/{name}") for name in ("metrics", "rounds", "trials")))


@pytest.fixture(scope="module")
def swept(here):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["space.yaml"])
    home = here / "results" / "sweep"
    tables = (pd.read_parquet(home / name) for name in ("metrics", "rounds", "trials"))
    return Ran(code, out.getvalue(), err.getvalue(), *tables)


def single(name, seed):
    """The same configuration without a sweep, in this process."""
    values = {"algorithm.name": name, "rounds": 3, "seed": seed, "results": "alone"}
    return rayfed.run({**yaml.safe_load(COMMON), **values})


class TestSweep:
    def test_statuses_and_errors(self, swept):
        assert swept.code == 1
        found = swept.trials.groupby("algorithm")["status"].agg(set).to_dict()
        assert found == {"fedavg": {"done"}, "sweep_mine:Failing": {"failed"}, "scaffold": {"diverged"}}
        errors = swept.trials.set_index("algorithm")["error"]
        assert set(errors["sweep_mine:Failing"].str.partition(" (")[0]) == {"ZeroDivisionError: my own mistake"}
        assert errors["sweep_mine:Failing"].str.contains(r"sweep_mine.py, line \d+, in finish\)$").all()
        assert all(error.startswith("round 1, ") for error in errors["scaffold"])
        assert errors["fedavg"].isna().all()
        traces = swept.trials.set_index("algorithm")["traceback"]
        assert all("sweep_mine.py" in trace for trace in traces["sweep_mine:Failing"])

    def test_each_wrong_trial_keeps_what_was_measured(self, swept):
        rounds = swept.rounds.groupby("algorithm")["round"].agg(sorted).to_dict()
        assert rounds["fedavg"] == [1, 1, 2, 2, 3, 3]
        assert rounds["sweep_mine:Failing"] == [1, 1]
        assert "scaffold" not in rounds

    def test_every_arm_with_every_seed_is_what_a_single_run_gives(self, swept):
        found = swept.trials.groupby("algorithm")["seed"].apply(sorted).to_dict()
        assert found == {name: [0, 1] for name in ("fedavg", "sweep_mine:Failing", "scaffold")}
        alone = single("fedavg", 1)
        (row,) = swept.trials.query("algorithm == 'fedavg' and seed == 1").to_dict("records")
        assert (row["weights_hash"], row["trial"]) == (alone.weights_hash, alone.trial)

    def test_prints_a_table_of_what_is_done_and_what_went_wrong(self, swept):
        assert "fedavg" in swept.out
        assert "pandas.read_parquet" in swept.out
        assert "my own mistake" in " ".join(swept.out.split())  # it may be wrapped
        assert swept.err.count("failed: ZeroDivisionError: my own mistake (") == 1
        assert "Traceback" not in swept.out + swept.err
        assert "6 trials: configurations fedavg 1, sweep_mine:Failing 1, scaffold 1" in swept.err
        assert "each with 2 seeds" in swept.err

    def test_plot_and_tensorboard(self, swept, here):
        home = here / "results" / "sweep"
        assert (home / "curves.png").stat().st_size > 1000
        events = list(home.glob("tensorboard/*/events.out.tfevents.*"))
        assert len(events) >= 4

    def test_resume_skips_what_is_done_and_hosts_change_no_bit(self, swept, capsys):
        """FedAvg with seed 0 is done; SCAFFOLD is new (another rate than the one that diverged), on two hosts."""
        scaffold = "arms=[{algorithm.name: fedavg}, {algorithm.name: scaffold}]"
        place = ("placement.hosts=2", "placement.cpus=0.5")
        again = ran(capsys, "space.yaml", "resume=true", "seeds=[0]", scaffold, *place)
        assert again.code == 0
        assert "2 trials: configurations fedavg 1, scaffold 1; each with 1 seed; 1 already done" in again.err
        before, after = (r.trials.set_index("trial") for r in (swept, again))
        assert len(after) == len(before) + 1
        pd.testing.assert_series_equal(after["started"][before.index], before["started"])
        (new,) = after.drop(before.index).to_dict("records")
        alone = single("scaffold", 0)
        assert (new["status"], new["weights_hash"], new["placement.hosts"]) == ("done", alone.weights_hash, 2)


@pytest.mark.slow
def test_a_trial_that_breaks_the_gpu_takes_no_other_with_it(here, capsys):
    arms = "arms=[{algorithm: {name: 'sweep_mine:Breaking', breaks: {grid: [always, once, never]}}}]"
    on_ray = "search={scheduler: asha, grace_rounds: 3, max_concurrent: 1}"
    others = ("seeds=[0]", "faults.restarts=1", "experiment=broken", "placement.gpus=0.5")
    found = ran(capsys, "space.yaml", arms, on_ray, *others, experiment="broken")
    trials = found.trials.set_index("algorithm.breaks")
    assert trials["status"].to_dict() == {"always": "failed", "once": "done", "never": "done"}
    (error,) = trials["error"].dropna()
    assert error.startswith(
        "lost 2 times without 10 rounds or a checkpoint in between (CUDA error: device-side assert triggered); "
        "faults.restarts=1"
    )
    assert "sweep_mine.py" in trials["traceback"]["always"]
    assert trials["weights_hash"]["once"] == trials["weights_hash"]["never"]
    events = rayfed.read_events(here / "results", "broken")
    assert events["event"].value_counts().to_dict() == {"trial restarted": 2}


@pytest.mark.slow
def test_a_server_that_breaks_its_gpu_is_started_again(here):
    values = {"algorithm.name": "sweep_mine:BreakingServer", "rounds": 3, "results": "server", "placement.hosts": 1}
    result = rayfed.run({**yaml.safe_load(COMMON), **values})
    assert result.weights_hash == single("fedavg", 0).weights_hash
    (event,) = rayfed.read_events("server").to_dict("records")
    restarted = "CUDA error: device-side assert triggered; continues after round 1"  # the best round so far is kept
    assert (event["event"], event["detail"]) == ("trial restarted", restarted)


class TestEarlyStopping:
    def test_asha_stops_some_and_finishes_the_best(self, swept, capsys):
        """Three learning rates one after the other, the best first: the others do not pass the first rung."""
        asha = "search={scheduler: asha, grace_rounds: 1, reduction_factor: 2, max_concurrent: 1}"
        arms = "arms=[{local.lr: {grid: [0.02, 1.0e-6, 1.0e-7]}}]"
        more = (asha, arms, "seeds=[0]", "rounds=6", "experiment=asha", "algorithm.name=fedavg", "select.metric=loss")
        enough = ("data.per_domain=300", "model.hidden=[32]", "local.epochs=3")  # that the first is better
        found = ran(capsys, "space.yaml", *more, *enough, experiment="asha")
        trials = found.trials.set_index("local.lr")
        assert found.code == 0
        assert set(trials["status"]) <= {"stopped", "done"}
        assert trials.loc[0.02, "status"] == "done"
        assert "stopped" in set(trials["status"])
        assert trials["error"].isna().all()
        lasts = found.rounds.groupby("trial")["round"].max().to_dict()
        for row in trials.reset_index().to_dict("records"):
            assert lasts[row["trial"]] == row["rounds_done"]
            assert (row["rounds_done"] == 6) == (row["status"] == "done")


@pytest.mark.parametrize(
    ("argument", "beginning"),
    [
        ("local.lr=-1", "local.lr=-1.0: must be more than 0"),
        ("local.lr={grid: []}", "local.lr: grid needs a list"),
        ("arms=[{faults.restarts: 1}, {faults.restarts: 2, rounds: 2}]", "faults: all arms of a sweep share"),
        ("placement.hosts=5", "placement.hosts=5: a trial needs 5 CPU"),
    ],
)
def test_a_refusal_is_one_line_with_nothing_started_or_written(here, capsys, tmp_path, argument, beginning):
    capsys.readouterr()
    assert main(["space.yaml", argument, f"results={tmp_path / 'results'}"]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.startswith(f"rayfed: {beginning}")) == ("", True), line
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_pieces_given_in_python_reach_the_processes_of_the_trials(here):
    """A model and a loss that are written here, and that no other process could import."""
    given = {
        "clients": as_mappings(blobs()),
        "model": lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3)),
        "loss": lambda logits, y: 2 * torch.nn.functional.cross_entropy(logits, y),
    }
    quick = {"local.batch_size": 5, "rounds": 1}
    swept = rayfed.sweep(quick | {"seeds": [0, 1]}, **given, experiment="given", keep_state=True, quiet=True)
    assert swept.trials["status"].tolist() == ["done", "done"]
    alone = rayfed.run(quick, **given, seed=1)
    assert swept.trials.set_index("trial").loc[alone.trial, "weights_hash"] == alone.weights_hash
    loaded = rayfed.load("results", "given", alone.trial, **given)
    assert torch.equal(loaded.model()[2].weight, alone.model()[2].weight)
