"""A trial step by step, one that loses a host on its way, checkpoints by the clock, and what is said of failures."""

from dataclasses import replace

import pytest

from helpers.commands import TWO_CLIENTS
from rayfed.core.errors import HostLost
from rayfed.engine.checkpoint import Checkpointer
from rayfed.engine.host import LocalFleet
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.simulation import Simulation, failure, run_trial
from rayfed.experiments.sweep import error_lines
from rayfed.records.progress import Progress
from rayfed.records.recorder import Recorder
from rayfed.reports.read import read, read_events

VALUES = TWO_CLIENTS | {"algorithm.name": "scaffold", "rounds": 6}


def ran(folder, fleet_class=LocalFleet, recorder=None, **more):
    """Run a trial and return its hash and its recorder."""
    plan = make_plan(Config.read(VALUES, {"results": str(folder), **more}))
    recorder = recorder or Recorder(plan.config.results, plan.config.experiment)
    saved = recorder.saved(plan.trial)
    fleet = fleet_class(plan.blueprint, plan.population)
    return run_trial(plan, recorder, lambda: fleet, "cpu", saved=saved, replaceable=True), recorder


class LosingFleet(LocalFleet):
    """Loses a host in the exchange after the fifth."""

    exchanges = 0

    def exchange(self, request, down, unicast):
        self.exchanges += 1
        if self.exchanges == 6:
            raise HostLost("host 0 died")
        return super().exchange(request, down, unicast)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("undisturbed"))[0]


class TestLostHost:
    """Tune starts the trial again in another process, which knows only what the recorder has."""

    def restarted(self, folder, **more):
        recorder = Recorder(str(folder), "run")
        with pytest.raises(HostLost):
            ran(folder, LosingFleet, recorder, **more)
        (progress,) = recorder.progress()
        assert progress.status == "running"
        recorder.lost(progress.trial, "host 0 died")
        digest, _ = ran(folder, LocalFleet, recorder, **more)
        tables = read(folder)
        assert tables.trials["status"].tolist() == ["done"]
        assert tables.rounds["round"].tolist() == [1, 2, 3, 4, 5, 6]
        assert tables.metrics.groupby("round").size().nunique() == 1
        (event,) = read_events(folder).to_dict("records")
        return digest, event

    def test_goes_on_after_the_last_checkpoint(self, tmp_path, undisturbed):
        digest, event = self.restarted(tmp_path, **{"checkpoint.every": 2})
        assert digest == undisturbed
        assert (event["event"], event["detail"]) == ("trial restarted", "host 0 died; continues after round 4")
        assert (event["round"], event["redone"]) == (5, 2)

    def test_starts_again_without_a_checkpoint(self, tmp_path, undisturbed):
        digest, event = self.restarted(tmp_path)
        assert digest == undisturbed
        assert (event["detail"], event["redone"]) == ("host 0 died; starts again at round 1", 10)


class Clock:
    """A clock on which every round takes a minute, and a checkpoint `saving` seconds."""

    def __init__(self, saving=0.0):
        self.now, self.saving = 0.0, saving

    def monotonic(self):
        return self.now


class TestCheckpointsByTheClock:
    def saved_after(self, folder, monkeypatch, *, saving=0.0, keep_state=False, **more):
        """Run six rounds of a minute, and return the rounds after which the state was saved, and the files left."""
        plan = replace(make_plan(Config.read(VALUES, {"results": str(folder), **more})), keep_state=keep_state)
        clock, rounds = Clock(saving), []
        monkeypatch.setattr("rayfed.experiments.simulation.time", clock)
        save = Checkpointer.save

        def timed(checkpointer):
            save(checkpointer)
            rounds.append(checkpointer.round)
            clock.now += saving

        monkeypatch.setattr(Checkpointer, "save", timed)
        recorder = Recorder(str(folder), "run")
        simulation = Simulation(plan, recorder, lambda: LocalFleet(plan.blueprint, plan.population), "cpu")
        with simulation.global_settings():
            steps = iter(simulation)
            while not simulation.done:
                clock.now += 60
                next(steps)
        return rounds, recorder.saved(plan.trial)

    def test_are_due_after_minutes_if_any_and_deleted_when_the_trial_is_done(self, tmp_path, monkeypatch):
        rounds, left = self.saved_after(tmp_path, monkeypatch, **{"checkpoint.minutes": 1.5})
        assert (rounds, left) == ([2, 4], [])
        assert self.saved_after(tmp_path / "off", monkeypatch, **{"checkpoint.minutes": 0}) == ([], [])

    def test_are_rarer_where_saving_takes_long(self, tmp_path, monkeypatch):
        rounds, _ = self.saved_after(tmp_path, monkeypatch, saving=2.0, **{"checkpoint.minutes": 0.5})
        assert rounds == [1, 5]  # 2 s are 1% of 200 s

    def test_of_a_state_that_is_kept_stay(self, tmp_path, monkeypatch):
        rounds, left = self.saved_after(
            tmp_path, monkeypatch, keep_state=True, **{"checkpoint.minutes": 4, "checkpoint.best": False}
        )
        assert rounds == [5, 6]
        assert left[0]["content"]["round"] == 6


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


ERROR = "ValueError: expected 3, got 4 (mine.py, line 7, in measure)"


def test_equal_errors_are_said_once_with_the_place_of_the_traceback():
    lines: list[str] = []
    update = error_lines("results", "run", lines.append)
    errors = [ERROR, ERROR.replace("got 4", "got 5"), "OSError: host 1 is full", "OSError: host 2 is full"]
    trials = [Progress(f"t{n}", 9, status="failed", error=e, has_traceback=n < 2) for n, e in enumerate(errors)]
    update(trials[:1])
    update([*trials, Progress("t4", 9), Progress("t5", 9, status="diverged", error="round 1")])
    assert lines == [
        f"t0 failed: {ERROR}; the full traceback is in results/run/tracebacks/t0.txt",
        "t2 failed: OSError: host 1 is full",
    ]


def test_an_error_has_the_innermost_place_of_the_users_code():
    def users():
        sorted([1, 2], key=lambda number: number / 0)

    with pytest.raises(ZeroDivisionError) as raised:
        users()
    row = failure(raised.value)
    assert (row["status"], "in users" in row["traceback"]) == ("failed", True)
    assert row["error"].startswith("ZeroDivisionError: division by zero (")
    assert row["error"].endswith(f"test_simulation.py, line {users.__code__.co_firstlineno + 1}, in <lambda>)")
