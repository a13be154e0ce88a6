"""What is said when Ray does not start, why an actor died, and what Tune's callback records. Without Ray."""

import socket
import time
from types import SimpleNamespace

import pytest
import ray

from rayfed.core.errors import HostLost, RayNotStarted
from rayfed.distributed import cluster, run, tune
from rayfed.distributed.ray_internals import cause_of_death, lost_its_node
from rayfed.distributed.schedulers import scheduler_of
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.space import Search, Space
from rayfed.records.recorder import Recorder
from rayfed.records.storage import open_storage
from rayfed.records.trials import read_trials


def refuse(error):
    def init(**options):
        raise error

    return init


class TestRayThatDoesNotStart:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch, tmp_path):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setattr(cluster, "session_folder", lambda: tmp_path / "ray")

    def test_ends_in_one_line(self, monkeypatch):
        monkeypatch.setattr(cluster, "start_here", refuse(RuntimeError("no node yet")))
        with pytest.raises(RayNotStarted, match=r"^Ray did not start \(no node yet\); its logs are in /.*/logs$"):
            cluster.connect(Placement(hosts=1), dashboard=False)

    def test_a_cluster_that_cannot_be_joined_is_named(self, monkeypatch):
        """And is no reason to do without it, as a Ray that does not start here is."""
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setattr(cluster, "_check_reachable", lambda: None)
        monkeypatch.setattr(cluster.ray, "init", refuse(RuntimeError("no node yet")))
        with pytest.raises(HostLost) as error:
            cluster.connect(Placement(hosts=1), dashboard=False)
        assert not isinstance(error.value, RayNotStarted)
        assert str(error.value) == (
            "the Ray cluster at 10.0.0.1:6379 cannot be joined (no node yet); check the address, or unset RAY_ADDRESS "
            "to use this machine alone"
        )

    def test_a_cluster_that_does_not_answer(self, monkeypatch, tmp_path):
        """First the one that `ray start` left a note of, then that of the environment."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        began = time.monotonic()
        with pytest.raises(HostLost, match=r"does not answer \(.*\); start it, or run ray stop to use this machine"):
            cluster.connect(Placement(hosts=1), dashboard=False)
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        with pytest.raises(HostLost, match=rf"^the Ray cluster at ray://{address} does not .*unset RAY_ADDRESS"):
            cluster.connect(Placement(hosts=1), dashboard=False)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: A\nThe actor is dead because its "
            "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits",
            "its process was killed or crashed",
        ),
        ("The actor is dead because its node has died. Node Id: 12", "its node died"),
        ("The actor is dead because its owner has died. Owner Id: 12", "its owner has died"),
        ("Task was killed due to the node running low on memory.", "its node ran out of memory"),
    ],
)
def test_the_cause_of_death_is_a_few_words(text, cause):
    assert cause_of_death(RuntimeError(text)) == cause


def test_who_misses_what_another_host_kept_did_not_die():
    gone = ray.exceptions.OwnerDiedError("00", None, "")
    assert cause_of_death(gone) == "it needs what was lost with another host"


class TestLostNode:
    """A process whose node dies may meet an error of Ray's core before Ray ends it."""

    def raised(self, file, error):
        try:
            exec(compile("raise error", file, "exec"), {"error": error})
        except Exception as caught:
            return caught

    def test_is_told_from_errors_of_the_disk_and_of_the_user(self):
        core = "python/ray/includes/common.pxi"
        assert lost_its_node(self.raised(core, OSError("Connection reset by peer")))
        assert not lost_its_node(self.raised(core, ValueError("no such actor")))
        assert not lost_its_node(self.raised("mine.py", OSError("Connection reset by peer")))
        assert not lost_its_node(OSError("never raised"))


@pytest.mark.parametrize(("begun", "statuses"), [(False, []), (True, ["interrupted"])])
def test_a_trial_that_is_under_way_when_tune_ends_was_interrupted(tmp_path, monkeypatch, begun, statuses):
    """One that was lost before it began has no row."""
    monkeypatch.setattr(tune, "start_recorder", lambda *given, in_sweep: Recorder(*given, in_sweep=in_sweep))
    monkeypatch.setattr(tune, "RemoteRecorder", lambda recorder: recorder)
    config = Config.read({"results": str(tmp_path)})
    space = Space(Search(), (0,), ((),), ())
    trials = tune._Trials([config], space, scheduler_of(space, [config], None), [], quiet=True)

    def fit():
        trials._recorder.lost("some", "its node died")
        if begun:
            values = {"algorithm": {"name": "fedavg"}, "seed": 0, "default_eval_point": "global"}
            trials._recorder.begin("some", values, 3, None)

    monkeypatch.setattr(trials, "_tuner", lambda *given: SimpleNamespace(fit=fit))
    trials.run({}, None, {}, lambda progress: [], str)
    assert [row["status"] for row in read_trials(open_storage(tmp_path).child("run", "trials"))] == statuses


def test_a_run_that_has_no_place_says_once_what_it_waits_for(monkeypatch):
    now = [0.0]
    states = iter(["CREATED", "RESCHEDULING", "RESCHEDULING", "RESCHEDULING", "CREATED"])
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "placement_group_table", lambda group: {"state": next(states)})
    said = []
    waiting = run._Waiting(None, [{}, {"CPU": 4.0}], said.append)
    for seconds in (10.0, 39.0, 41.0, 80.0, 90.0):
        now[0] = seconds
        waiting.check()
        assert bool(said) == (seconds > 40)
    assert said == ["no trial has begun for 30 s: it needs [{}, {'CPU': 4.0}]; `ray status` shows what is free"]
