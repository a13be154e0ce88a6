"""Hosts that die, hang or come late cost time and change nothing; lost machines are noticed as such."""

import os
import signal
import sys
import threading
import time

import pytest
import ray
import torch
from ray.util.placement_group import remove_placement_group

from helpers import federations
from helpers.federations import blobs, blueprint
from helpers.ray_session import start_ray
from rayfed.algorithms.afl import AFL
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import HostLost
from rayfed.distributed.cluster import _reserved
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.ray_fleet import RayFleet
from rayfed.distributed.ray_host import RayHost
from rayfed.distributed.server_process import make_pool
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.config import Config, Faults, Placement

pytestmark = pytest.mark.ray

PEOPLE = blobs(8)


@pytest.fixture(scope="module", autouse=True)
def session():
    for module in (sys.modules[__name__], federations):  # which workers cannot import
        ray.cloudpickle.register_pickle_by_value(module)
    start_ray()


def pause():
    """Take 0.2 s in a host, and no time in the run in one process that is compared with it."""
    if ray._private.worker.global_worker.mode == ray.WORKER_MODE:
        time.sleep(0.2)


class Slow(Scaffold):
    """SCAFFOLD whose clients take 0.2 s."""

    def finish(self, ctx, work, client, down, data):
        pause()
        return super().finish(ctx, work, client, down, data)


class SlowAFL(AFL):
    """AFL whose clients take 0.2 s."""

    def finish(self, ctx, work, client, down, data):
        pause()
        return super().finish(ctx, work, client, down, data)


class BreaksDevice(Scaffold):
    """SCAFFOLD whose host loses its GPU in round 2 if the file exists, as does every call after that in its process."""

    def __init__(self, bad):
        super().__init__()
        object.__setattr__(self, "bad", bad)

    def finish(self, ctx, work, client, down, data):
        if ray._private.worker.global_worker.mode == ray.WORKER_MODE:
            if ctx.round == 2 and ctx.client == 3 and self.bad.exists():
                self.bad.unlink()
                os.environ["NO_GPU"] = "1"
            if "NO_GPU" in os.environ:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
        return super().finish(ctx, work, client, down, data)


def fleet_of(plan, hosts, **more):
    placement, faults = Placement(hosts=hosts, cpus=0.5), Faults(**{"restarts": 3, "patience": 60.0} | more)
    pool = HostPool(cpus=0.5, gpus=0.0, group=None)
    return RayFleet(plan, PEOPLE, placement, faults, device=torch.device("cpu"), pool=pool)


def disturbed(algorithm, hosts, disturb, *, rounds=3, until=None, **more):
    """Run with hosts, `disturb(processes)` after a while in another thread; compare with a run in one process.

    With `until`, the name of an event, both end with the round in which it happens.
    """
    plan = blueprint(algorithm, PEOPLE, rounds=500 if until else rounds)
    fleet = fleet_of(plan, hosts, **more)
    server = Server(plan, PEOPLE, fleet, Evaluation(points=("global",)))
    processes = [handle.process[0] for handle in fleet.hosts.handles]
    timer = threading.Timer(0.9, disturb, [processes])
    timer.start()
    records = []
    try:
        for record in server.run():
            records.append(record)
            if until in [event.event for event in record.events]:
                break
        digest = server.state_hash()
    finally:
        timer.join()
        fleet.close()
    alone = Server(plan, PEOPLE, LocalFleet(plan, PEOPLE), Evaluation(points=("global",)))
    expected = alone.run()
    for record in records:
        assert sorted(record.scores) == sorted(next(expected).scores)
    if until is None:
        assert list(expected) == []
    assert digest == alone.state_hash()
    return [event for record in records for event in record.events]


@pytest.mark.parametrize("algorithm", [Slow(), pytest.param(SlowAFL(), marks=pytest.mark.slow)])
def test_a_killed_host_is_replaced_and_what_it_did_is_done_again(algorithm):
    events = disturbed(algorithm, 2, lambda found: os.kill(found[1], signal.SIGKILL), until="host started")
    assert events[0].event == "host lost"
    assert "host 1" in events[0].detail
    assert events[0].redone > 0
    assert 0 < events[0].seconds < 30


def test_a_host_without_its_gpu_is_replaced(tmp_path):
    bad = tmp_path / "bad"
    bad.touch()
    events = disturbed(BreaksDevice(bad), 1, lambda processes: None, rounds=2)
    assert [event.event for event in events] == ["host lost", "host started"]
    assert events[0].detail == "host 0: CUDA error: an illegal memory access was encountered"


class OnShare(RayHost):
    """A host that reserves its share of a GPU and computes on the CPU."""

    def take_up(self, blueprint, population, gpus, share=1.0, position=0):
        self.share = gpus
        return super().take_up(blueprint, population, 0.0, share, position)

    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], self.share


@pytest.mark.slow
def test_a_host_without_its_gpu_is_replaced_on_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.distributed.host_pool.RayHost", OnShare)
    (bad := tmp_path / "bad").touch()
    plan = blueprint(BreaksDevice(bad), PEOPLE, rounds=3)
    config = Config.read({"placement": {"hosts": 2, "gpus": 0.5, "cpus": 0.5}})
    group = _reserved(config)
    fleet = RayFleet(
        plan,
        PEOPLE,
        config.placement,
        config.faults,
        device=torch.device("cpu"),
        pool=make_pool(config, group, keep=False),
    )
    try:
        gpus = [ray.get([handle.actor.gpu.remote() for handle in fleet.hosts.handles])]
        server = Server(plan, PEOPLE, fleet, Evaluation(points=("global",)))
        events = [event for record in server.run() for event in record.events]
        gpus.append(ray.get([handle.actor.gpu.remote() for handle in fleet.hosts.handles]))
        digest = server.state_hash()
    finally:
        fleet.close()
        remove_placement_group(group)
    assert (events[0].event, events[0].round) == ("host lost", 2)
    assert gpus[0] == gpus[1]
    assert {share for _, share in gpus[0]} == {0.5}
    assert len({gpu for gpu, _ in gpus[0]}) == 2
    alone = Server(plan, PEOPLE, LocalFleet(plan, PEOPLE), Evaluation(points=("global",)))
    list(alone.run())
    assert digest == alone.state_hash()


@pytest.mark.slow
def test_the_only_host_may_be_lost():
    events = disturbed(Slow(), 1, lambda processes: os.kill(processes[0], signal.SIGKILL), rounds=2)
    assert [event.event for event in events] == ["host lost", "host started"]


@pytest.mark.slow
def test_a_hanging_host_is_replaced():
    def stop(processes):
        os.kill(processes[0], signal.SIGSTOP)

    processes = []
    events = disturbed(Slow(), 2, lambda found: (processes.extend(found), stop(found)), rounds=6, patience=2.0)
    assert "host hanging" in [event.event for event in events]
    end = time.monotonic() + 20
    while time.monotonic() < end and alive(processes[0]):
        time.sleep(0.1)
    assert not alive(processes[0])  # it does not come back


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_without_restarts_the_others_go_on():
    events = disturbed(Slow(), 2, lambda processes: os.kill(processes[0], signal.SIGKILL), rounds=4, restarts=0)
    assert [event.event for event in events] == ["host lost"]


@pytest.mark.slow
def test_when_all_are_lost_the_run_ends_with_one_line():
    with pytest.raises(HostLost, match=r"^all hosts are lost \(host 0: .*\); faults.restarts replaces more of them$"):
        disturbed(Slow(), 1, lambda processes: os.kill(processes[0], signal.SIGKILL), restarts=0)


def test_states_outlive_hosts_and_loading_brings_them_back():
    plan = blueprint(Scaffold(), PEOPLE, rounds=2)
    fleet = fleet_of(plan, 2)
    server = Server(plan, PEOPLE, fleet, Evaluation(points=()))
    list(server.run())
    for handle in fleet.hosts.handles:
        os.kill(handle.process[0], signal.SIGKILL)
    states = {client: fleet.states[client] for client in fleet.states}
    assert sorted(states) == list(range(8))
    hashes = fleet.hashes()  # by the hosts that replace them
    versions = {client: fleet.states.version(client) for client in states}
    fleet.load((client, states[client]) for client in (1, 3))
    assert sorted(fleet.states) == [1, 3]
    assert fleet.states.version(1) != versions[1]
    assert {client: fleet.hashes()[client] for client in (1, 3)} == {client: hashes[client] for client in (1, 3)}
    fleet.close()


@pytest.mark.slow
def test_auto_starts_hosts_where_the_cluster_has_room():
    plan = blueprint(Slow(), PEOPLE, rounds=500)
    room = int(ray.cluster_resources()["CPU"] / 0.5)
    fleet = fleet_of(plan, "auto")
    server = Server(plan, PEOPLE, fleet, Evaluation(points=("global",)))
    records = []
    for record in server.run():
        records.append(record)
        if record.stage == "round" and sum(seconds > 0 for seconds in record.busy) > 1:
            break
    assert any(event.event == "host started" for record in records for event in record.events)
    assert 1 < len(fleet.hosts.handles) <= room
    alone = Server(plan, PEOPLE, LocalFleet(plan, PEOPLE), Evaluation(points=("global",)))
    for record in alone.run():
        if (record.stage, record.round) == (records[-1].stage, records[-1].round):
            break
    assert server.state_hash() == alone.state_hash()
    fleet.close()
