"""A trial, step by step; and one that loses states of clients on its way."""

import importlib.metadata

import pytest

from rayfed.core.errors import HostLost, StatesLost
from rayfed.engine.fleet import LocalFleet
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.trial import TrialRun, run_trial
from rayfed.records.recorder import Recorder
from rayfed.reports.read import read, read_events

VALUES = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.1},
    "algorithm.name": "scaffold",
    "rounds": 6,
}


class LosingFleet(LocalFleet):
    """Loses the states of all clients in the exchanges with these numbers."""

    def __init__(self, plan, losses):
        super().__init__(plan.blueprint, plan.population)
        self.losses, self.exchanges = set(losses), 0

    def exchange(self, request, down, unicast):
        self.exchanges += 1
        result = super().exchange(request, down, unicast)
        if self.exchanges in self.losses:
            self.states.clear()
            raise StatesLost("the state of client 0 was lost with its machine")
        return result


def ran(folder, losses=(), **more):
    """Run a trial; return its hash, its fleet, its tables and its events."""
    plan = make_plan(Config.read(VALUES, {"results": str(folder), **more}))
    fleet = LosingFleet(plan, losses)
    digest = run_trial(plan, Recorder(plan.config.results, plan.config.experiment), lambda: fleet, "cpu")
    return digest, fleet, read(folder), read_events(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("undisturbed"))[0]


class TestStatesLost:
    def check(self, tables, events):
        (status,) = tables.trials["status"]
        assert status == "done"
        assert tables.rounds["round"].tolist() == [1, 2, 3, 4, 5, 6]
        assert tables.metrics.groupby("round").size().nunique() == 1
        assert set(events["event"]) == {"trial restarted"}
        assert (events["seconds"] > 0).all()

    def test_goes_on_after_its_last_checkpoint(self, tmp_path, undisturbed):
        """Exchange 6 is lost, after round 5; the checkpoint is of round 4."""
        digest, fleet, tables, events = ran(tmp_path, [6], **{"checkpoint.every": 2})
        assert digest == undisturbed
        assert fleet.exchanges == 8  # six rounds, and rounds 5 and 6 again
        self.check(tables, events)
        (event,) = events.to_dict("records")
        assert event["detail"] == "the state of client 0 was lost with its machine; continues after round 4"
        assert (event["round"], event["redone"]) == (5, 2)

    def test_starts_again_without_a_checkpoint(self, tmp_path, undisturbed):
        digest, fleet, tables, events = ran(tmp_path, [3])
        assert (digest, fleet.exchanges) == (undisturbed, 9)
        self.check(tables, events)
        assert events["redone"].tolist() == [4]

    def test_several_times(self, tmp_path, undisturbed):
        digest, _, tables, events = ran(tmp_path, [1, 4, 6], **{"checkpoint.every": 1})
        assert digest == undisturbed
        self.check(tables, events)
        assert len(events) == 3

    def test_too_often(self, tmp_path):
        with pytest.raises(HostLost, match=r"lost with its machine; faults.restarts=1 allows no more"):
            ran(tmp_path, [2, 3], **{"faults.restarts": 1})
        (row,) = read(tmp_path).trials.to_dict("records")
        assert row["status"] == "failed"
        assert row["error"].endswith("faults.restarts=1 allows no more")


def test_steps_are_rounds_and_the_last_one_ends_the_trial(tmp_path, undisturbed):
    plan = make_plan(Config.read(VALUES, {"results": str(tmp_path)}))
    run = TrialRun(plan, Recorder(str(tmp_path), "run"), lambda: LocalFleet(plan.blueprint, plan.population), "cpu")
    for round in range(1, 7):
        assert not run.done
        assert run.step().round == run.round == round
    assert run.done
    assert (run.step(), run.outcome) == (None, undisturbed)
    assert read(tmp_path).trials["status"].tolist() == ["done"]
    run.close()


def test_a_trial_needs_no_installed_package(tmp_path, monkeypatch):
    """rayfed runs from a tree on the path, too."""

    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert ran(tmp_path, rounds=1)


@pytest.mark.parametrize(("replaceable", "status"), [(True, "running"), (False, "failed")])
def test_a_gpu_that_fails_ends_no_trial_that_goes_on_elsewhere(tmp_path, monkeypatch, replaceable, status):
    def fail(*given):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(LocalFleet, "exchange", fail)
    plan = make_plan(Config.read(VALUES, {"results": str(tmp_path)}))
    recorder, fleet = Recorder(str(tmp_path), "run"), LocalFleet(plan.blueprint, plan.population)
    with pytest.raises(RuntimeError, match="CUDA error"):
        run_trial(plan, recorder, lambda: fleet, "cpu", replaceable=replaceable)
    assert [progress.status for progress in recorder.progress()] == [status]
