"""Nodes that die in the middle of a run or a sweep, and nodes that join: two raylets on this machine stand for them."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import ray

import rayfed
from helpers.commands import command
from helpers.ray_processes import processes, wait_until
from helpers.sleeping import write_sleeping
from rayfed.distributed.cluster import _started_in_time
from rayfed.distributed.private_session import protect_token
from rayfed.reports.read import read, read_events

pytestmark = [pytest.mark.ray, pytest.mark.slow]

COMMON = {
    "data": {"domains": ["plain", "font", "blurred", "street"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [200]},  # states of more than 100 KB stay on the node that computed them
    "local": {"batch_size": 8, "lr": 0.1},
    "algorithm.name": "sleeping_on_nodes:Sleeping",
    "checkpoint.every": 5,
    "rounds": 40,
}
# Ray may notice the end of the process before that of its node.
CAUSE = re.compile(
    r"lost \((its node died|its process was killed or crashed)\); faults.restarts=0 allows no other start"
)
VALUES = [f"{key}={value}".replace("'", "") for key, value in COMMON.items()]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    write_sleeping(folder, "sleeping_on_nodes")
    (folder / "space.yaml").write_text("seeds: [0, 1]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def undisturbed(here):
    """The hashes of the final states with the seeds 0 and 1."""
    alone = {**COMMON, "results": "undisturbed", "checkpoint.every": 0}
    return [rayfed.run({**alone, "seed": seed}, keep_state=False).weights_hash for seed in (0, 1)]


@pytest.fixture
def cpus():
    """The CPUs of the head."""
    return 1


@pytest.fixture
def cluster(here, monkeypatch, cpus):
    """A head, and whatever nodes a test adds."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    protect_token()
    authentication = pytest.importorskip("ray._private.authentication.authentication_token_setup")
    authentication.enable_token_auth_by_default()
    with _started_in_time(300):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    ray.shutdown()
    cluster.shutdown()


def last_rounds(folder):
    """The last round on disk of each trial that has any."""
    files = Path(folder).glob("run/rounds/*.parquet")
    try:
        return [max(pd.read_parquet(file, columns=["round"])["round"], default=0) for file in files]
    except OSError:  # pandas opens a file twice, and it was replaced in between
        return []


@contextlib.contextmanager
def once(ready, act):
    """Call `act` in another thread as soon as `ready()`."""
    errors = []

    def wait():
        try:
            wait_until(ready)
            act()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()
    assert errors == []


def raylet(node):
    """The process id of a node's raylet."""
    return node.all_processes["raylet"][0].process.pid


def servers_raylet():
    """The process id of the raylet on whose node the server runs."""
    (server,) = processes("_ServerActor")
    return psutil.Process(server).ppid()


def kill(node):
    """Kill a node's raylet, as the loss of a machine does; its processes end with it."""
    os.kill(raylet(node), signal.SIGKILL)


@contextlib.contextmanager
def joining(ready, address, cpus):
    """Let a node join, as `ray start` does on another machine, as soon as `ready()`."""
    nodes = []
    command = [str(Path(sys.prefix) / "bin/ray"), "start", "--address", address, "--num-cpus", str(cpus), "--block"]

    def start():
        nodes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    try:
        with once(ready, start):
            yield
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


def ran(name, *arguments):
    files = ["space.yaml"] if name == "sweep" else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(name)([*files, *VALUES, *arguments])
    assert "Traceback" not in err.getvalue()
    return code, err.getvalue()


class TestSweep:
    """Two trials, one on each node."""

    def both_begun(self, folder):
        return lambda: len(rounds := last_rounds(folder)) == 2 and min(rounds) >= 7

    def test_its_trial_goes_on_elsewhere(self, cluster, undisturbed):
        node = cluster.add_node(num_cpus=1)
        with once(self.both_begun("swept"), lambda: kill(node)):
            code, said = ran("sweep", "results=swept")
        assert code == 0, said
        assert "); it is started again from its last checkpoint" in said
        trials = read("swept").trials.sort_values("seed")
        assert trials["status"].tolist() == ["done", "done"]
        assert trials["weights_hash"].tolist() == undisturbed
        assert read_events("swept")["event"].tolist() == ["trial lost", "trial restarted"]
        assert "continues after round" in read_events("swept")["detail"].iloc[1]

    def test_without_restarts_it_has_failed(self, cluster, undisturbed):
        node = cluster.add_node(num_cpus=1)
        with once(self.both_begun("failed"), lambda: kill(node)):
            code, said = ran("sweep", "results=failed", "faults.restarts=0")
        assert code == 1, said
        trials = read("failed").trials.set_index("status")
        assert sorted(trials.index) == ["done", "failed"]
        assert CAUSE.fullmatch(trials.loc["failed", "error"])
        assert trials.loc["failed", "error"] in said
        assert trials.loc["done", "weights_hash"] in undisturbed


class TestRun:
    @pytest.mark.parametrize("cpus", [0])
    def test_goes_back_to_its_checkpoint_where_states_are_lost(self, cluster, undisturbed):
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        begun = lambda: max(last_rounds("back"), default=0) >= 8  # noqa: E731

        def lose_the_other_node():
            kill(next(node for node in nodes if raylet(node) != servers_raylet()))

        with once(begun, lose_the_other_node):
            code, said = ran("run", "results=back", "placement.hosts=2")
        assert code == 0, said
        assert read("back").trials["weights_hash"].tolist() == undisturbed[:1]
        events = read_events("back")
        assert "host lost" in events["event"].tolist()
        restarted = events[events["event"] == "trial restarted"].iloc[-1]
        assert "lost with" in restarted["detail"]
        assert "continues after round" in restarted["detail"]
        assert read("back").rounds["round"].tolist() == list(range(1, 41))

    @pytest.mark.parametrize("cpus", [0])
    @pytest.mark.parametrize("server_cpus", [0, 1])
    def test_its_server_goes_on_elsewhere(self, cluster, undisturbed, server_cpus):
        sizes = (1 + server_cpus, 1)  # no node has room for what the other one held
        nodes = [cluster.add_node(num_cpus=size) for size in sizes]
        results = f"without_server_{server_cpus}"

        def lose_the_servers_node():
            kill(next(node for node in nodes if raylet(node) == servers_raylet()))

        begun = lambda: max(last_rounds(results), default=0) >= 8  # noqa: E731
        with once(begun, lose_the_servers_node):
            code, said = ran("run", f"results={results}", "placement.hosts=2", f"placement.server_cpus={server_cpus}")
        assert code == 0, said
        assert "the server died" in said
        assert read(results).trials["weights_hash"].tolist() == undisturbed[:1]
        assert "server lost" in read_events(results)["event"].tolist()
        assert read(results).rounds["round"].tolist() == list(range(1, 41))

    @pytest.mark.parametrize("cpus", [0])
    @pytest.mark.parametrize("late", [0, 45])
    def test_goes_on_where_its_only_node_is_lost(self, cluster, undisturbed, late):
        """Another node has room already, or joins only after processes were allowed to start."""
        nodes = [cluster.add_node(num_cpus=2) for _ in range(1 if late else 2)]
        results, lost = f"without_node_{late}", []

        def lose_the_node():
            assert {psutil.Process(host).ppid() for host in processes("RayHost")} == {servers_raylet()}
            kill(next(node for node in nodes if raylet(node) == servers_raylet()))
            lost.append(time.monotonic())

        begun = lambda: max(last_rounds(results), default=0) >= 8  # noqa: E731
        late_enough = lambda: lost and time.monotonic() - lost[0] > late  # noqa: E731
        joins = joining(late_enough, cluster.address, 2) if late else contextlib.nullcontext()
        more = [f"results={results}", "placement.hosts=2", "faults.start_seconds=30", f"placement.autoscale={late > 0}"]
        with once(begun, lose_the_node), joins:
            code, said = ran("run", *more)
        assert code == 0, said
        assert read(results).trials["weights_hash"].tolist() == undisturbed[:1]
        assert read(results).rounds["round"].tolist() == list(range(1, 41))

    def test_takes_in_a_node_that_joins(self, cluster, undisturbed):
        begun = lambda: max(last_rounds("grown"), default=0) >= 3  # noqa: E731
        with joining(begun, cluster.address, 2):
            code, said = ran("run", "results=grown", "placement.hosts=auto", "rounds=200")
        assert code == 0, said
        events = read_events("grown")
        assert events["event"].tolist() == ["host started", "host started"]
        alone = rayfed.run({**COMMON, "results": "alone", "checkpoint.every": 0, "rounds": 200}, keep_state=False)
        tables = read("grown")
        assert tables.trials["weights_hash"].tolist() == [alone.weights_hash]
        busy = tables.rounds.sort_values("round")["busy_seconds"]
        assert len([seconds for seconds in busy.iloc[0] if seconds]) == 1
        assert len(busy.iloc[-1]) == 3  # of which some may be idle, where a round is short


class TestCluster:
    """The head ends under a command of its own process, as after `ray stop`."""

    @pytest.mark.parametrize("name", ["run", "sweep"])
    def test_the_command_ends_with_one_line_and_can_be_resumed(self, cluster, undisturbed, monkeypatch, name):
        results = f"headless_{name}"
        arguments = ["space.yaml", *VALUES] if name == "sweep" else [*VALUES, "placement.hosts=1", "placement.cpus=0.5"]
        process = subprocess.Popen(
            [sys.executable, "-m", "rayfed", name, *arguments, f"results={results}"],
            env=os.environ | {"PYTHONPATH": str(Path(rayfed.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            begun = lambda: max(last_rounds(results), default=0) >= 8  # noqa: E731
            wait_until(lambda: begun() or process.poll() is not None, seconds=400)  # a busy machine starts slowly
            for kind in ("gcs_server", "raylet"):
                os.kill(cluster.head_node.all_processes[kind][0].process.pid, signal.SIGKILL)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 1, said
        assert "Traceback" not in said
        told = [line for line in said.splitlines() if line.startswith(("rayfed: ", "note: "))]
        how = "continues after the last checkpoint" if name == "run" else "runs the trials that are left"
        assert told == [
            "rayfed: Ray has ended on this machine, as after ray stop; everything recorded before that is kept, and "
            f"the same command with resume=true {how}"
        ]
        wait_until(lambda: set(read(results).trials["status"]) == {"lost"})  # its other processes end a little later
        ray.shutdown()
        monkeypatch.setenv("RAY_ADDRESS", "local")
        code, said = ran(name, *(arguments[-2:] if name == "run" else ()), f"results={results}", "resume=true")
        assert code == 0, said
        trials = read(results).trials.sort_values("seed")
        assert trials["weights_hash"].tolist() == (undisturbed if name == "sweep" else undisturbed[:1])
