"""Nodes that die in the middle of a run or a sweep: raylets on this machine stand for them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

import rayfed
from helpers.ray_processes import meanwhile, processes, wait_until
from helpers.sleeping import last_rounds, ran, sleeping_here
from rayfed.distributed.cluster import protect_token
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
VALUES = [f"{key}={value}".replace("'", "") for key, value in COMMON.items()]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    with sleeping_here(tmp_path_factory.mktemp("nodes"), "sleeping_on_nodes", seeds=[0, 1]):
        yield


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
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def once(ready, act):
    """Call `act` in another thread as soon as `ready()`."""
    return meanwhile(lambda: (wait_until(ready), act()))


def raylet(node):
    """The process id of a node's raylet."""
    return node.all_processes["raylet"][0].process.pid


def servers_raylet():
    """The process id of the raylet on whose node the server runs."""
    (server,) = processes("ServerActor")
    return psutil.Process(server).ppid()


def kill(node):
    """Kill a node's raylet, as the loss of a machine does; its processes end with it."""
    os.kill(raylet(node), signal.SIGKILL)


class TestSweep:
    """Two trials, one on each node."""

    def both_begun(self, folder):
        return lambda: len(rounds := last_rounds(folder)) == 2 and min(rounds) >= 7

    def test_its_trial_goes_on_elsewhere(self, cluster, undisturbed):
        node = cluster.add_node(num_cpus=1)
        with once(self.both_begun("swept"), lambda: kill(node)):
            code, said = ran("sweep", VALUES, "results=swept")
        assert code == 0, said
        assert "); it starts again from its last checkpoint" in said
        trials = read("swept").trials.sort_values("seed")
        assert trials["status"].tolist() == ["done", "done"]
        assert trials["weights_hash"].tolist() == undisturbed
        (event,) = read_events("swept").to_dict("records")
        assert event["event"] == "trial restarted"
        assert "continues after round" in event["detail"]


class TestRun:
    @pytest.mark.parametrize("cpus", [0])
    @pytest.mark.parametrize("lost", ["server", "host"])
    def test_goes_back_to_its_checkpoint(self, cluster, undisturbed, lost):
        """Its hosts are on two nodes, and a third one has room."""
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        results = f"without_{lost}"

        def lose():
            hosts = {psutil.Process(host).ppid() for host in processes("RayHost")}
            others = hosts - {servers_raylet()}
            kill(next(node for node in nodes if raylet(node) in (others if lost == "host" else {servers_raylet()})))

        begun = lambda: max(last_rounds(results), default=0) >= 8  # noqa: E731
        with once(begun, lose):
            code, said = ran("run", VALUES, f"results={results}", "placement.hosts=2")
        assert code == 0, said
        assert "it starts again from its last checkpoint" in said
        assert read(results).trials["weights_hash"].tolist() == undisturbed[:1]
        assert set(read_events(results)["event"]) == {"trial restarted"}
        assert read(results).rounds["round"].tolist() == list(range(1, 41))


class TestCluster:
    """The head ends under a command of its own process, as after `ray stop`."""

    def test_the_command_ends_and_can_be_resumed(self, cluster, undisturbed, monkeypatch):
        process = subprocess.Popen(
            [sys.executable, "-m", "rayfed", "sweep", "space.yaml", *VALUES, "results=headless"],
            env=os.environ | {"PYTHONPATH": str(Path(rayfed.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            begun = lambda: max(last_rounds("headless"), default=0) >= 8  # noqa: E731
            wait_until(lambda: begun() or process.poll() is not None, seconds=400)  # a busy machine starts slowly
            for kind in ("gcs_server", "raylet"):
                os.kill(cluster.head_node.all_processes[kind][0].process.pid, signal.SIGKILL)
            _, said = process.communicate(timeout=150)  # Ray gives up on its head after 60 s
        finally:
            process.kill()
        assert process.returncode != 0, said
        wait_until(lambda: set(read("headless").trials["status"]) == {"lost"})  # its other processes end a little later
        ray.shutdown()
        monkeypatch.setenv("RAY_ADDRESS", "local")
        code, said = ran("sweep", VALUES, "results=headless", "resume=true")
        assert code == 0, said
        trials = read("headless").trials.sort_values("seed")
        assert trials["weights_hash"].tolist() == undisturbed
