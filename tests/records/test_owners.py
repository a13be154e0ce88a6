"""Which process runs a trial, and trials whose process has died."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from helpers.watcher import read_only
from rayfed.cli.main import main
from rayfed.core.errors import UsageError
from rayfed.core.round_record import Event, Record
from rayfed.experiments.config import Config
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.sources import from_arguments
from rayfed.records.owners import is_alive, is_owner
from rayfed.records.recorder import Recorder
from rayfed.records.storage import open_storage
from rayfed.records.trials import claimed
from rayfed.reports.read import read, read_events
from rayfed.reports.render import render

VALUES = {"algorithm": {"name": "fedavg"}, "seed": 0, "default_eval_point": "global"}

OTHER = f"""
import sys, time
from rayfed.records.recorder import Recorder
recorder = Recorder(sys.argv[1], "run")
recorder.begin("a", {VALUES}, 3, None)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which runs the trial `a`."""
    process = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def begun(folder, trial="a", keep_through_round=None):
    recorder = Recorder(str(folder), "run")
    recorder.begin(trial, VALUES, 3, keep_through_round)
    return recorder


class TestTwoProcesses:
    def test_the_second_is_told_who_runs_the_trial(self, tmp_path, other):
        with pytest.raises(UsageError, match=rf"a: process {other.pid} on .* since .* is running it; wait, or end"):
            begun(tmp_path)
        assert read(tmp_path).trials["status"].tolist() == ["running"]

    def test_a_claim_is_refused_and_names_it(self, tmp_path, other):
        words = rf"^a: process {other.pid} on .* is running it; wait"
        with pytest.raises(UsageError, match=words), claimed(tmp_path, "run", ["b", "a"]):
            pass
        with claimed(tmp_path, "run", ["b"]):
            pass
        other.kill()
        other.wait()
        with claimed(tmp_path, "run", ["b", "a"]):
            begun(tmp_path).end("a", {"status": "done"})

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_when_it_has_died_the_trial_is_lost_and_can_be_run(self, tmp_path, other, number):
        other.send_signal(number)
        other.wait()
        assert read(tmp_path).trials["status"].tolist() == ["lost"]
        assert "1 of 1 trials are not done and do not count: 1 lost." in render(tmp_path)
        recorder = begun(tmp_path)
        assert read(tmp_path).trials["status"].tolist() == ["running"]
        recorder.end("a", {"status": "done"})
        assert read(tmp_path).trials["status"].tolist() == ["done"]


class TestFiles:
    """The files of owners, in `.owners`."""

    def test_who_reads_leaves_those_of_the_dead_and_who_begins_removes_them(self, tmp_path, other):
        other.kill()
        other.wait()
        files = sorted((tmp_path / "run" / ".owners").iterdir())
        assert [file.suffix for file in files] == [".json", ".lock"]
        assert read(tmp_path).trials["status"].tolist() == ["lost"]
        assert sorted((tmp_path / "run" / ".owners").iterdir()) == files
        with claimed(tmp_path, "run", ["b"]):
            left = sorted((tmp_path / "run" / ".owners").iterdir())
            assert len(left) == 2
            assert not set(left) & set(files)
        assert not any((tmp_path / "run" / ".owners").iterdir())

    def test_nothing_else_is_removed(self, tmp_path):
        owners = tmp_path / "run" / ".owners"
        owners.mkdir(parents=True)
        names = ["mine.json", "mine.lock", "deadbeef0.json", "DEADBEEF.json", "deadbeef.lock"]
        for name in names:
            (owners / name).write_text("{}")
        os.mkfifo(owners / "0123abcd.json")
        with claimed(tmp_path, "run", ["a"]):
            pass
        assert sorted(path.name for path in owners.iterdir()) == sorted(names)

    def test_a_name_that_is_no_owners_leads_to_no_file(self, tmp_path):
        for name in ("h 1 t ../../x", "h 1 t /x", "h 1 t deadbee", "deadbeef", "h 1 t deadbeef\n", "", None, 7):
            assert not is_owner(name)
        with pytest.raises(ValueError, match="names no owner"):
            is_alive(open_storage(tmp_path), "h 1 t ../x")

    def test_a_folder_that_became_read_only_does_not_hide_the_error_of_the_run(self, tmp_path):
        def run(mounts):
            with claimed(tmp_path, "run", ["a"]):
                mounts.enter_context(read_only(tmp_path))
                raise ZeroDivisionError

        with ExitStack() as mounts, pytest.raises(ZeroDivisionError):
            run(mounts)


class TestClaims:
    """Of commands whose trials have not begun."""

    def test_a_trial_is_claimed_once(self, tmp_path):
        with claimed(tmp_path, "run", ["a", "b", "c"]):
            words = rf"^a \(and 1 more\): process {os.getpid()} on .* is going to run it; wait"
            with pytest.raises(UsageError, match=words), claimed(tmp_path, "run", ["d", "b", "a"]):
                pass
            with claimed(tmp_path, "run", ["d"]), claimed(tmp_path, "other", ["a"]):
                pass
        with claimed(tmp_path, "run", ["a"]):
            pass

    def test_commands_are_refused_before_anything_starts(self, here, capsys):
        small = ["model.name=mlp", "rounds=1", "data.per_domain=20", "local.batch_size=2"]
        (here / "space.yaml").write_text("seeds: [0, 1]\n")
        trial = trial_name(Config.read(from_arguments(small)))
        with claimed("results", "run", [trial]):
            for arguments in (["run", *small], ["sweep", "space.yaml", *small]):
                assert main(arguments) == 2
                out, err = capsys.readouterr()
                assert err.splitlines()[-1].startswith(f"rayfed: {trial}: process {os.getpid()} on ")
                assert out == ""
        assert not (here / "results/run/metrics").exists()


def record(round, **more):
    return Record(stage="round", round=round, cohort=2, **more)


class TestEvents:
    def test_are_rows_with_the_trial(self, tmp_path):
        recorder = begun(tmp_path)
        before = time.time()
        recorder.event("a", Event(event="trial restarted", detail="host 1", round=1, redone=3, seconds=0.5))
        recorder.event("a", Event(event="rounds added", round=1))
        recorder.end("a", {"status": "done"})
        events = read_events(tmp_path)
        assert events.columns.tolist() == [
            *("experiment", "trial", "algorithm", "seed", "time", "event", "detail", "round", "redone", "seconds")
        ]
        assert events["event"].tolist() == ["trial restarted", "rounds added"]
        first = events.iloc[0]
        assert (first["trial"], first["algorithm"], first["seed"]) == ("a", "fedavg", 0)
        assert (first["detail"], first["round"], first["redone"], first["seconds"]) == ("host 1", 1, 3, 0.5)
        assert abs(first["time"].timestamp() - before) < 60

    def test_a_trial_that_was_lost_keeps_rows_through_its_checkpoint(self, tmp_path):
        recorder = begun(tmp_path)
        assert not recorder.has_begun("b")
        for round in (1, 2):
            recorder.record("a", record(round, seconds=dict.fromkeys(record(1).seconds, 1.5)))
        assert recorder.lost("a", "host 1 died").lost == 1
        assert recorder.has_begun("a")
        recorder.begin("a", VALUES, 3, 1)
        for round in (2, 3):
            recorder.record("a", record(round))
        recorder.end("a", {"status": "done"})
        (again,) = read_events(tmp_path).to_dict("records")
        assert (again["event"], again["detail"]) == ("trial restarted", "host 1 died; continues after round 1")
        assert (again["round"], again["redone"]) == (2, 2)
        assert again["seconds"] >= 1.5
        assert read(tmp_path).rounds["round"].tolist() == [1, 2, 3]

    def test_a_new_run_drops_those_of_an_earlier_one(self, tmp_path):
        recorder = begun(tmp_path)
        recorder.event("a", Event(event="rounds added"))
        recorder.end("a", {"status": "failed", "error": "x"})
        begun(tmp_path).end("a", {"status": "done"})
        assert read_events(tmp_path).empty
