"""Blueprints that cannot be trained."""

import pytest

from helpers.federations import blobs, blueprint, net, quadratic, quadratics, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.experiments.config import build_algorithm

POINT = ["downloaded"]  # where batch norm stays with the clients there is no global model


class TestChecks:
    def test_a_batch_larger_than_a_client(self):
        with pytest.raises(UsageError, match=r"local.batch_size=21: client 0 has 20 training examples"):
            simulate(blueprint(FedAvg(), blobs(4), batch_size=21), blobs(4))
        simulate(blueprint(FedAvg(), blobs(4), batch_size=50, drop_last=False, model=net(False)), blobs(4))

    @pytest.mark.parametrize("name", ["faug", "fedgen", "fedproto", "fedrod", "fraug", "vhl", "dbe"])
    def test_labels_that_are_no_classes(self, name):
        """As in a regression: these methods count classes, and would end in the middle of a run."""
        curves, base = quadratics((1.0, 0.0), (2.0, 1.0), copies=4), {"base": "fedrod"} if name == "dbe" else {}
        algorithm = build_algorithm({"name": name, **base}, where="algorithm")
        with pytest.raises(UsageError) as error:
            blueprint(algorithm, curves, model=net(), loss=quadratic, batch_size=2).check(curves)
        assert str(error.value) == f"algorithm.name={name}: needs data with classes; these labels are float32 [n, 2]"

    def test_width_needs_equal_batches(self):
        with pytest.raises(UsageError, match=r"placement.vmap_clients=2: .*client 1"):
            simulate(blueprint(FedAvg(), blobs(4), vmap_clients=2, drop_last=False), blobs(4))

    def test_phases_of_steps(self):
        population = blobs(4)
        plan = blueprint(FedAvg(), population, local=Phase("train", steps=3), rounds=1, batch_norm="local")
        server, _ = simulate(plan, population, points=POINT)
        assert {int(s["weights"]["body.1.num_batches_tracked"]) for s in server.fleet.states.values()} == {3}
