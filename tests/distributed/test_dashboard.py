"""What Ray's dashboard shows of trials: the names of processes."""

import pytest
import ray

from helpers.ray_processes import actor_names
from helpers.ray_session import start_ray
from rayfed.distributed.host_pool import HostPool


@pytest.mark.ray
def test_the_processes_of_hosts_are_named_after_their_trial():
    start_ray()
    pool = HostPool([{}, {}, {}], None, name="fedavg-seed0")
    try:
        ray.get([actor.__ray_ready__.remote() for actor in pool.actors])
        assert {"fedavg-seed0 host 0", "fedavg-seed0 host 1"} <= actor_names("RayHost")
    finally:
        pool.close()
