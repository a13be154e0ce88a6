"""Processes that are killed or stopped while a run or a sweep goes on: it ends as if nothing had happened."""

import contextlib
import io
import logging
import signal
import threading
from pathlib import Path

import pandas as pd
import pytest
import ray

import rayfed
from helpers.commands import command
from helpers.ray_processes import processes, send, wait_until
from helpers.sleeping import write_sleeping
from rayfed.distributed.private_session import start_here
from rayfed.reports.read import read, read_events

pytestmark = [pytest.mark.ray, pytest.mark.slow]

COMMON = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.1},
    "algorithm.name": "sleeping_scaffold:Sleeping",
    "checkpoint.every": 5,
    "rounds": 60,
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_sleeping(folder, "sleeping_scaffold")
    arguments = "\n".join(f"{key}: {value}" for key, value in COMMON.items())
    (folder / "space.yaml").write_text(f"seeds: [0]\n{arguments}\n".replace("'", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        ray.shutdown()
        start_here(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        yield folder
        ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(here):
    return rayfed.run({**COMMON, "results": "undisturbed", "checkpoint.every": 0}).weights_hash


def last_round(folder):
    """The last round on disk, or -1."""
    try:
        return max(pd.read_parquet(f"{folder}/run/rounds", columns=["round"])["round"], default=-1)
    except (OSError, ValueError):  # no folder, or nothing in it yet
        return -1


@contextlib.contextmanager
def disturbed(folder, *faults):
    """Send each (round, title, signal) of `faults` once that round is on disk."""
    errors = []

    def disturb():
        try:
            for round, title, number in faults:
                wait_until(lambda round=round: last_round(folder) >= round)
                send(title, number)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    yield
    thread.join()
    assert errors == []


def check_complete(folder, digest):
    tables = read(folder)
    (row,) = tables.trials.to_dict("records")
    assert (row["status"], row["weights_hash"]) == ("done", digest)
    assert tables.rounds["round"].tolist() == list(range(1, 61))
    counts = tables.metrics.groupby("round").size()
    assert counts.index.tolist() == list(range(1, 61))
    assert counts.nunique() == 1
    wait_until(lambda: not processes("SweepTrial") and not processes("_ServerActor"))


def swept(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command("sweep")(["space.yaml", *arguments])
    return code, err.getvalue()


class TestSweep:
    def test_recorder_and_trial_killed(self, here, undisturbed):
        faults = ((4, "Recorder", signal.SIGKILL), (23, "SweepTrial", signal.SIGKILL))
        with disturbed("killed", *faults):
            code, said = swept("results=killed")
        assert code == 0, said
        assert "Traceback" not in said
        assert "note: the recorder was lost" in said
        assert " was lost (its process was killed or crashed); it is started again" in said
        check_complete("killed", undisturbed)
        events = read_events("killed")
        assert events["event"].tolist() == ["recorder lost", "trial lost", "trial restarted"]
        restarted = events.iloc[-1]
        saved = int(restarted["detail"].removeprefix("continues after round "))
        assert saved >= 20
        assert restarted["redone"] == 2 * (restarted["round"] - saved)
        assert restarted["seconds"] > 0

    def test_trial_stopped(self, here, undisturbed):
        with disturbed("stopped", (7, "SweepTrial", signal.SIGSTOP)):
            code, said = swept("results=stopped", "faults.patience=4")
        assert code == 0, said
        check_complete("stopped", undisturbed)
        assert read_events("stopped")["event"].tolist() == ["trial hanging", "trial restarted"]

    def test_lost_too_often(self, here):
        with disturbed("failed", (7, "SweepTrial", signal.SIGKILL)):
            code, said = swept("results=failed", "faults.restarts=0")
        assert code == 1
        assert "Traceback" not in said
        (row,) = pd.read_parquet(Path("failed/run/trials")).to_dict("records")
        cause = "lost (its process was killed or crashed); faults.restarts=0 allows no other start"
        assert (row["status"], row["error"]) == ("failed", cause)
        assert row["rounds_done"] >= 7
        assert read_events("failed")["event"].tolist() == ["trial lost"]


class TestRun:
    def ran(self, results, *arguments):
        values = [f"{key}={value}".replace("'", "") for key, value in COMMON.items()]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command("run")([*values, f"results={results}", "placement.hosts=1", *arguments])
        return code, err.getvalue()

    def test_recorder_stopped_and_server_killed_and_stopped(self, here, undisturbed):
        faults = (
            (4, "Recorder", signal.SIGSTOP),
            (17, "_ServerActor", signal.SIGKILL),
            (32, "_ServerActor", signal.SIGSTOP),
        )
        with disturbed("served", *faults):
            code, said = self.ran("served", "faults.patience=5")
        assert code == 0, said
        assert "Traceback" not in said
        check_complete("served", undisturbed)
        expected = ["recorder hanging", "server lost", "trial restarted", "server hanging", "trial restarted"]
        assert read_events("served")["event"].tolist() == expected

    def test_server_killed_too_often(self, here):
        with disturbed("unserved", (7, "_ServerActor", signal.SIGKILL)):
            code, said = self.ran("unserved", "faults.restarts=0")
        assert code == 1
        assert said.splitlines()[-1] == (
            "rayfed: the server died (its process was killed or crashed), and faults.restarts=0 allows no other"
        )
        assert "Traceback" not in said
        assert read("unserved").trials["status"].tolist() == ["failed"]
        assert read_events("unserved")["event"].tolist() == ["server lost"]
