"""Which GPU Ray gives to which process, with GPUs that Ray only counts."""

import os
import sys

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from helpers.ray_session import start_ray
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.tune_server import SentJob, TuneServer
from rayfed.experiments.capacity import reserved, servers_gpus
from rayfed.experiments.config import Config
from rayfed.experiments.sweep import Job

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def session():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which workers cannot import
    start_ray()
    assert ray.cluster_resources()["GPU"] == 4


class Probe:
    """A process in place of a host or server."""

    def __init__(self, *given):
        pass

    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]


def started(group, gpus, bundle=0):
    there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(Probe).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=there).remote()


def reserve(bundles):
    group = placement_group([bundle for bundle in bundles if bundle], strategy="PACK")
    ray.get(group.ready(), timeout=60)
    return group


def config_of(**tree):
    return Config.read({"placement": {"cpus": 0.25} | tree.pop("placement"), **tree})


@pytest.mark.parametrize(
    ("name", "placement", "picture"),
    [
        ("fedavg", {"hosts": 4, "gpus": 0.5}, "0: host 0, host 1; 1: host 2, host 3; CPU: server"),
        ("adcol", {"hosts": 4, "gpus": 1}, "0: server, host 0; 1: host 1; 2: host 2; 3: host 3"),
        ("fedavg", {"hosts": 2, "gpus": 0.25, "server_gpus": 0.5}, "0: server, host 0, host 1"),
    ],
)
def test_hosts_and_server_fill_a_gpu_before_the_next(monkeypatch, name, placement, picture):
    config = config_of(algorithm={"name": name}, placement=placement)
    monkeypatch.setattr("rayfed.distributed.host_pool.RayHost", Probe)
    bundles = reserved(config)
    group = reserve(bundles)
    try:
        probes = {"server": started(group, share)} if (share := servers_gpus(config)) else {}
        probes |= {f"host {k}": actor for k, actor in enumerate(HostPool(bundles, group).actors)}
        gpus = dict(zip(probes, ray.get([probe.gpus.remote() for probe in probes.values()]), strict=True))
    finally:
        remove_placement_group(group)
    together = [", ".join(name for name in gpus if gpus[name] == gpu) for gpu in dict.fromkeys(gpus.values())]
    on_gpus = "; ".join(f"{number}: {names}" for number, names in enumerate(together))
    assert on_gpus + ("" if "server" in gpus else "; CPU: server") == picture


def test_two_trials_of_a_sweep_share_a_gpu():
    job = SentJob.of(Job(trial="t", config=config_of(placement={"gpus": 0.5}), identity={}), {})
    groups = [TuneServer.default_resource_request({"job": job})() for _ in range(2)]
    try:
        first, second = ray.get([started(group, 0.5).gpus.remote() for group in groups])
        assert first == second
    finally:
        for group in groups:
            remove_placement_group(group)
