"""Batch-norm policies: what travels, what stays with the clients, and how statistics are averaged."""

import pytest
import torch

from helpers.federations import blobs, blueprint, net, simulate
from rayfed.algorithms.fedavg import FedAvg

BN = {f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
STATISTICS = {name for name in BN if "running" in name or "tracked" in name}


class TestBatchNorm:
    def run(self, policy, rounds=2):
        population = blobs(3)
        return simulate(
            blueprint(FedAvg(), population, batch_norm=policy, rounds=rounds), population, points=["downloaded"]
        )

    @pytest.mark.parametrize(
        ("policy", "kept"), [("aggregate", set()), ("local", BN), ("local_statistics", STATISTICS), ("frozen", set())]
    )
    def test_what_travels_and_what_stays(self, policy, kept):
        server, records = self.run(policy)
        names = set(net().state_dict())
        assert set(server.state["weights"]) == names - kept
        sent = sum(net().state_dict()[name].nbytes for name in names - kept)
        assert records[0].bytes_up["weights"] == records[0].bytes_down["weights"] == 3 * sent
        states = server.fleet.states
        assert all(set(state["weights"]) == kept for state in states.values())
        for name in kept:
            assert not torch.equal(states[0]["weights"][name].double(), states[1]["weights"][name].double()) or (
                name.endswith("tracked")
            )

    def test_aggregated_statistics_are_the_weighted_mean(self):
        server, _ = self.run("aggregate", rounds=1)
        alone, _ = self.run("local_statistics", rounds=1)
        sizes = [20, 26, 33]
        states = alone.fleet.states
        mean = sum(n / 79 * states[i]["weights"]["body.1.running_mean"].double() for i, n in enumerate(sizes))
        torch.testing.assert_close(server.state["weights"]["body.1.running_mean"].double(), mean)

    def test_the_counter_stays_a_whole_number(self):
        server, _ = self.run("aggregate", rounds=2)
        counter = server.state["weights"]["body.1.num_batches_tracked"]
        assert counter.dtype == torch.int64
        assert counter.item() == 12  # the client with most: 33 // 5 = 6 steps a round
        local, _ = self.run("local", rounds=2)
        counts = [int(s["weights"]["body.1.num_batches_tracked"]) for s in local.fleet.states.values()]
        assert counts == [8, 10, 12]

    def test_frozen_leaves_the_layer_as_it_was(self):
        server, _ = self.run("frozen")
        initial = net().state_dict()
        assert all(torch.equal(server.state["weights"][name], initial[name]) for name in BN)
        assert not torch.equal(server.state["weights"]["fc.weight"], initial["fc.weight"])
