"""Trials and hosts that run at once on a machine divide its memory for data and states."""

from types import SimpleNamespace

import pytest
import ray
import torch

from helpers.federations import blobs, blueprint
from helpers.ray_session import start_ray
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.machine import memory_bytes
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.ray_fleet import RayFleet
from rayfed.distributed.server_trials import simulation_on
from rayfed.engine.device_data import room_for
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.records.recorder import Recorder

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def four_cpus():
    start_ray()


@pytest.mark.parametrize(
    ("options", "at_once", "share"),
    [
        ({}, 1, 1),
        ({}, 3, 1 / 3),
        ({}, 100, 1 / 4),
        ({"placement.cpus": 2}, 100, 1 / 2),
        ({"placement.cpus": 0.5}, 100, 1 / 8),
    ],
)
def test_trials_without_hosts(tmp_path, options, at_once, share):
    plan = make_plan(Config.read({"results": str(tmp_path), "rounds": 1} | options))
    run = simulation_on(plan, Recorder(str(tmp_path), "run"), None, at_once=at_once)
    fleet = run._make_fleet()
    assert fleet.states._kept._room == pytest.approx(share * memory_bytes() / 4)
    assert fleet.host.data._room == pytest.approx(room_for(None, "cpu", share))


def test_a_given_limit_is_that_of_a_trial(tmp_path):
    plan = make_plan(Config.read({"results": str(tmp_path), "rounds": 1, "state.memory": 0.5}))
    fleet = simulation_on(plan, Recorder(str(tmp_path), "run"), None, at_once=100)._make_fleet()
    assert fleet.states._kept._room == 2**29


def test_hosts(monkeypatch):
    people = blobs(2)
    pool = HostPool([{}, {"CPU": 1.0}, {"CPU": 1.0}], None)
    plan = ray.put(blueprint(FedAvg(), people))
    try:
        for at_once, share in ((None, 1 / 2), (2, 1 / 2), (3, 1 / 3), (100, 1 / 4)):
            given = {"sent": plan, "device": torch.device("cpu"), "pool": pool, "hosts_at_once": at_once}
            fleet = RayFleet(blueprint(FedAvg(), people), people, **given)
            assert fleet._memory_shares(pool, at_once or 2) == [pytest.approx(share)] * 2
        shared = SimpleNamespace(bundles=[{"CPU": 1.0, "GPU": 0.25}, {"CPU": 1.0}])
        assert fleet._memory_shares(shared, 100) == [0.25, 0.25]
    finally:
        pool.close()
