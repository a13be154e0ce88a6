"""Processes that are killed while a run or a sweep goes on: it ends as if nothing had happened, or resumes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

import rayfed
from helpers.commands import TWO_CLIENTS
from helpers.ray_processes import meanwhile, processes, send, wait_until
from helpers.ray_session import start_ray
from helpers.sleeping import last_rounds, ran, sleeping_here
from rayfed.reports.read import read, read_events

pytestmark = pytest.mark.ray

COMMON = TWO_CLIENTS | {"algorithm.name": "sleeping_scaffold:Sleeping", "checkpoint.every": 5, "rounds": 30}
VALUES = [f"{key}={value}".replace("'", "") for key, value in COMMON.items()]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    with sleeping_here(tmp_path_factory.mktemp("faults"), "sleeping_scaffold", seeds=[0]):
        start_ray()
        yield


@pytest.fixture(scope="module")
def undisturbed(here):
    return rayfed.run({**COMMON, "results": "undisturbed", "checkpoint.every": 0}, keep_state=False).weights_hash


def disturbed(folder, *faults):
    """Kill the process with each (round, title) of `faults` once that round is on disk; None: Ctrl-C, here."""

    def disturb():
        for round, title in faults:
            wait_until(lambda round=round: max(last_rounds(folder), default=-1) >= round)
            send(title, signal.SIGKILL) if title else os.kill(os.getpid(), signal.SIGINT)

    return meanwhile(disturb)


def check_complete(folder, digest):
    tables = read(folder)
    (row,) = tables.trials.to_dict("records")
    assert (row["status"], row["weights_hash"]) == ("done", digest)
    assert tables.rounds["round"].tolist() == list(range(1, 31))
    counts = tables.metrics.groupby("round").size()
    assert counts.index.tolist() == list(range(1, 31))
    assert counts.nunique() == 1
    wait_until(lambda: not processes("ServerActor") and not processes("RayHost"))


def test_a_host_and_the_server_of_a_run(here, undisturbed):
    with disturbed("run", (7, "RayHost"), (17, "ServerActor")):
        code, said = ran("run", VALUES, "results=run", "placement.hosts=1")
    assert code == 0, said
    check_complete("run", undisturbed)
    assert re.search(
        r"was lost after round \d+ \(host 0 died: its process was killed or crashed\); it starts again", said
    )
    assert re.search(
        r"was lost after round \d+ \(its server: its process was killed or crashed\); it starts again", said
    )
    events = read_events("run")
    assert events["event"].tolist() == ["trial restarted"] * 2
    first, second = events.to_dict("records")
    assert first["detail"].startswith("host 0 died: its process was killed or crashed; continues after round ")
    saved = int(second["detail"].rpartition(" ")[2])
    assert saved >= 15
    assert second["redone"] == 2 * (second["round"] - saved)
    assert second["seconds"] > 0


def test_a_host_and_the_server_of_asynchronous_rounds(here):
    clock, schedule = {"step_seconds": 1, "speed_spread": 1}, {"name": "buffered", "concurrency": 2, "buffer": 1}
    values = {**COMMON, "clock": clock, "schedule": schedule}
    digest = rayfed.run({**values, "results": "serial", "checkpoint.every": 0}, keep_state=False).weights_hash
    given = [f"{key}={value}".replace("'", "") for key, value in values.items()]
    with disturbed("asynchronous", (6, "RayHost"), (12, "ServerActor")):
        code, said = ran("run", given, "results=asynchronous", "placement.hosts=1")
    assert code == 0, said
    check_complete("asynchronous", digest)


def test_ctrl_c_ends_a_run_that_resumes_and_leaves_the_handler_of_python(here, undisturbed):
    handler, values = signal.getsignal(signal.SIGINT), {**COMMON, "results": "stopped", "placement.hosts": 1}
    with disturbed("stopped", (7, None)), pytest.raises(KeyboardInterrupt, match="with resume=true continues"):
        rayfed.run(values)
    assert signal.getsignal(signal.SIGINT) is handler
    assert read("stopped").trials["status"].tolist() == ["interrupted"]
    assert rayfed.run({**values, "resume": True}, keep_state=False).weights_hash == undisturbed
    assert signal.getsignal(signal.SIGINT) is handler
    check_complete("stopped", undisturbed)


@pytest.mark.slow
def test_each_checkpoint_allows_as_many_restarts_again(here, undisturbed):
    with disturbed("often", (6, "RayHost"), (12, "RayHost"), (18, "ServerActor"), (24, "RayHost")):
        code, said = ran("run", VALUES, "results=often", "checkpoint.every=2", "faults.restarts=1", "placement.hosts=1")
    assert code == 0, said
    check_complete("often", undisturbed)
    assert read_events("often")["event"].tolist() == ["trial restarted"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("process", "named"), [("RayHost", "host 0 died"), ("ServerActor", "its server")])
def test_a_process_that_is_stopped_is_ended_after_a_while(here, undisturbed, process, named):
    stopped = []

    def stop():
        wait_until(lambda: max(last_rounds(process), default=-1) >= 7)
        stopped.append(send(process, signal.SIGSTOP))

    with meanwhile(stop):
        code, said = ran("run", VALUES, f"results={process}", "faults.patience=0.05", "placement.hosts=1")
    assert code == 0, said
    check_complete(process, undisturbed)
    (event,) = read_events(process).to_dict("records")
    assert event["detail"].startswith(f"{named}: its process is stopped; continues after round ")
    assert not psutil.pid_exists(stopped[0])


@pytest.mark.slow
def test_lost_too_often(here):
    with disturbed("failed", (7, "ServerActor")):
        code, said = ran("run", VALUES, "results=failed", "faults.restarts=0", "placement.hosts=1")
    assert code == 1
    (row,) = pd.read_parquet(Path("failed") / "run" / "trials").to_dict("records")
    cause = "lost (its server: its process was killed or crashed); faults.restarts=0 allows no other start"
    assert (row["status"], row["error"]) == ("failed", cause)
    assert row["rounds_done"] >= 7
    assert cause in said


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hosts"), [("sweep", 0), ("run", 1)])
def test_without_its_recorder_a_command_ends_with_one_line_and_resumes(here, undisturbed, name, hosts):
    folder = f"unrecorded_{name}"
    values = (f"results={folder}", f"placement.hosts={hosts}")
    with disturbed(folder, (7, "Recorder")):
        code, said = ran(name, VALUES, *values)
    assert code == 1
    assert said.splitlines()[-1] == (
        "rayfed: the recorder died (its process was killed or crashed); what it had written is kept, and the same "
        "command with resume=true continues"
    )
    code, said = ran(name, VALUES, *values, "resume=true")
    assert code == 0, said
    check_complete(folder, undisturbed)


@pytest.mark.slow
def test_a_killed_command_resumes(here, undisturbed):
    process = subprocess.Popen(
        [sys.executable, "-m", "rayfed", "run", *VALUES, "results=killed", "placement.hosts=1"],
        env=os.environ | {"PYTHONPATH": str(Path(rayfed.__file__).parents[1]), "RAY_ADDRESS": "local"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: max(last_rounds("killed"), default=-1) >= 12, seconds=300)
    finally:
        process.kill()
    wait_until(lambda: set(read("killed").trials["status"]) == {"lost"})
    code, said = ran("run", VALUES, "results=killed", "resume=true", "placement.hosts=1")
    assert code == 0, said
    check_complete("killed", undisturbed)
