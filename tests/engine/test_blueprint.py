"""Which client lives on which host, and blueprints that cannot be trained."""

import numpy as np
import pytest

from helpers.federations import blobs, blueprint, net, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.engine.blueprint import deal

POINT = ["downloaded"]  # where batch norm stays with the clients there is no global model


class TestDeal:
    SIZES = (100, 1, 50, 50, 7, 30, 62, 100, 3, 0)

    @pytest.mark.parametrize("hosts", [1, 2, 3, 4, 10, 12])
    def test_everyone_has_one_home(self, hosts):
        homes = deal(self.SIZES, hosts)
        assert len(homes) == hosts
        assert sorted(i for home in homes for i in home) == list(range(len(self.SIZES)))
        assert all(home == sorted(home) for home in homes)

    def test_loads_differ_by_less_than_the_largest_client(self):
        rng = np.random.default_rng(0)
        for _ in range(20):
            sizes = rng.integers(1, 200, rng.integers(5, 40)).tolist()
            loads = [sum(sizes[i] for i in home) for home in deal(sizes, 4)]
            assert max(loads) - min(loads) <= max(sizes)

    def test_largest_first(self):
        assert deal([4, 3, 3, 2, 2, 2], 2) == [[0, 3, 4], [1, 2, 5]]  # 8 and 8; dealt by id it would be 9 and 7

    def test_equal_clients_are_spread_evenly(self):
        assert [len(home) for home in deal([10] * 12, 4)] == [3, 3, 3, 3]


class TestChecks:
    def test_a_batch_larger_than_a_client(self):
        with pytest.raises(UsageError, match=r"local.batch_size=21: client 0 has 20 training examples"):
            simulate(blueprint(FedAvg(), blobs(4), batch_size=21), blobs(4))
        simulate(blueprint(FedAvg(), blobs(4), batch_size=50, drop_last=False, model=net(False)), blobs(4))

    def test_width_needs_equal_batches(self):
        with pytest.raises(UsageError, match=r"placement.vmap_clients=2: .*client 1"):
            simulate(blueprint(FedAvg(), blobs(4), vmap_clients=2, drop_last=False), blobs(4))

    def test_phases_of_steps(self):
        population = blobs(4)
        plan = blueprint(FedAvg(), population, local=Phase("train", steps=3), rounds=1, batch_norm="local")
        server, _ = simulate(plan, population, points=POINT)
        assert {int(s["weights"]["body.1.num_batches_tracked"]) for s in server.fleet.states.values()} == {3}
