"""What counts as a loss, what Tune makes of it, and how a process that does not work is found, without a cluster."""

import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.tune.experiment.trial import Trial

from rayfed.core.errors import HostLost
from rayfed.core.machine import Process
from rayfed.core.round_record import Record
from rayfed.distributed import late_servers, liveness
from rayfed.distributed.liveness import watched_and_ended
from rayfed.distributed.ray_internals import PreemptedHost, cause_of_death, is_preempted
from rayfed.distributed.running_trials import RunningTrials
from rayfed.experiments.config import Faults
from rayfed.records.progress import Progress, TrialProgress
from rayfed.records.round_report import RoundReport


def died(*, preempted):
    return RayActorError(error_msg="The actor died because its node died.", preempted=preempted)


def raised(cause):
    """As Tune gets what a step has raised: from another process."""
    return pickle.loads(pickle.dumps(RayTaskError("step", "traceback", cause)))


@pytest.mark.parametrize(
    ("error", "failures"),
    [
        (died(preempted=False), 1),
        (died(preempted=True), 0),
        (raised(HostLost("host 0 died: its node died")), 1),
        (raised(PreemptedHost("host 0 died: its node was taken away")), 0),
    ],
)
def test_tune_counts_no_process_whose_node_was_taken_away(error, failures):
    trial = Mock(run_metadata=Mock(num_failures=0), is_restoring=False, local_path=None)
    trial._handle_ray_actor_error = lambda error: Trial._handle_ray_actor_error(trial, error)
    trial._handle_ray_task_error = lambda error: Trial._handle_ray_task_error(trial, error)
    Trial.handle_error(trial, error)
    assert trial.run_metadata.num_failures == failures
    assert is_preempted(error) == (not failures)


def test_the_words_for_a_node_that_was_taken_away():
    assert cause_of_death(died(preempted=True)) == "its node was taken away"
    words = "host 1 died: its node was taken away"
    for error in (raised(PreemptedHost(words)), raised(HostLost(words)), raised(HostLost(words)).as_instanceof_cause()):
        assert cause_of_death(error) == words
    assert not is_preempted(ActorDiedError())


def progress_through(*rounds, begun=0):
    values = {"default_eval_point": "global"}
    trial = TrialProgress()
    trial.begin("t", values, 100, begun)
    for number in rounds:
        trial.add(RoundReport.of(Record(stage="round", round=number, cohort=1)))
    return trial


class TestRestarts:
    def test_ten_rounds_renew_them(self):
        trial = progress_through(1, 2)
        trial.lose("t", "its node died", counts=True)
        trial.lose("t", "its node died", counts=True)
        trial.begin("t", {"default_eval_point": "global"}, 100, 0)
        for number in range(1, 10):
            trial.add(RoundReport.of(Record(stage="round", round=number, cohort=1)))
            assert (trial.shown.restarts, trial.shown.lost) == (2, 2)
        trial.add(RoundReport.of(Record(stage="round", round=10, cohort=1)))
        assert (trial.shown.restarts, trial.shown.lost) == (0, 2)

    def test_a_new_checkpoint_renews_them(self):
        trial = progress_through(1, 2, 3)
        trial.saved(3)
        trial.lose("t", "its node died", counts=True)
        trial.begin("t", {"default_eval_point": "global"}, 100, 3)
        trial.saved(3)  # as it was before
        assert trial.shown.restarts == 1
        trial.saved(4)
        assert trial.shown.restarts == 0

    def test_a_node_that_was_taken_away_does_not_count(self):
        trial = progress_through(1)
        trial.lose("t", "its node was taken away", counts=False)
        assert (trial.shown.restarts, trial.shown.lost) == (0, 1)


class TestRunningTrials:
    @staticmethod
    def tune_trial(failures=0, status="RUNNING"):
        counts = {"num_failures": failures, "max_failures": 3}
        return SimpleNamespace(custom_trial_name="t", status=status, **counts)

    @pytest.mark.parametrize(("restarts", "failures", "allowed"), [(0, 0, 3), (2, 2, 3), (0, 5, 8), (3, 5, 5)])
    def test_tune_is_told_how_many_failures_are_allowed(self, restarts, failures, allowed):
        trial = self.tune_trial(failures)
        RunningTrials(Faults(restarts=3)).check([trial], [Progress("t", 100, restarts=restarts)])
        assert trial.max_failures == allowed

    @pytest.mark.parametrize("answer_first", [True, False])
    def test_a_late_server_is_asked_for_by_its_node(self, monkeypatch, answer_first):
        """The node may say that it has ended the server before or after the loss is known."""
        now, asked = [0.0], []
        answers = iter(["", "its process is stopped"])
        monkeypatch.setattr(late_servers.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(late_servers.ray, "wait", lambda calls, timeout: (calls, []))
        monkeypatch.setattr(liveness, "end_if_stuck", lambda process: asked.append(process) or "call")
        monkeypatch.setattr(liveness, "reason", lambda call: next(answers))
        trial, where = self.tune_trial(), Process("node", 7)
        running = RunningTrials(Faults(patience=1))
        shown = Progress("t", 100, round=4, seconds=80.0, process=where)  # 20 s a round: late after 200 s

        def at(seconds):
            now[0] = seconds
            running.check([trial], [shown])
            return len(asked)

        assert at(0.0) == 0
        assert at(199.0) == 0
        assert at(201.0) == 1
        assert at(202.0) == 1  # it works, and is asked again after the same time
        assert at(401.0) == 1
        assert at(403.0) == 2
        if answer_first:
            assert at(404.0) == 2
        assert running.why_ended("t") == "its process is stopped"
        assert running.why_ended("t") == ""
        assert asked == [where, where]


class TestWatched:
    @pytest.fixture
    def process(self):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
            yield process
            process.kill()

    def test_one_that_waits_is_left_alone(self, process):
        assert watched_and_ended(process.pid, seconds=0.4) == ""
        assert process.poll() is None

    def test_one_that_is_stopped_is_ended(self, process):
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert watched_and_ended(process.pid, seconds=0.4) == "its process is stopped"
        assert process.wait(10) == -signal.SIGKILL

    def test_one_that_is_gone(self, process):
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert watched_and_ended(process.pid, seconds=0.4) == "its process is gone"
        process.wait()
        assert watched_and_ended(process.pid, seconds=0.4) == "its process is gone"

    @pytest.mark.parametrize(("script", "found"), [("echo GPU-1", ""), ("exit 15", "its GPU does not answer")])
    def test_one_whose_gpu_is_gone(self, process, tmp_path, monkeypatch, script, found):
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert watched_and_ended(process.pid, ("1",), seconds=0.4) == found
        assert "--id=1" in (tmp_path / "asked").read_text()
        assert (process.poll() is None) == (not found) or process.wait(10) == -signal.SIGKILL
