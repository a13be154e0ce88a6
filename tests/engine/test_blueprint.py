"""Blueprints that cannot be trained; what batch-norm policies send, keep and average."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers.algorithm_cases import build_algorithm
from helpers.federations import blobs, blueprint, net, quadratic, quadratics, simulate
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.experiments.checks import check_trial


class TestChecks:
    def test_a_client_with_less_than_a_batch_trains_on_what_it_has(self):
        people, model = blobs(1, sizes=(20,)), net(False)
        server, _ = simulate(blueprint(FedAvg(), people, batch_size=50, model=model, rounds=1), people)
        x, y = (torch.from_numpy(values) for values in (people.clients[0].train.x, people.clients[0].train.y))
        cross_entropy(model.head(model.features(x)), y).backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close(server.state["weights"][name], value.data - 0.05 * value.grad)

    @pytest.mark.parametrize("name", ["faug", "fedgen", "fedproto", "fedrod", "fraug", "vhl", "dbe"])
    def test_labels_that_are_no_classes(self, name):
        """As in a regression: these methods count classes, and would end in the middle of a run."""
        curves, base = quadratics((1.0, 0.0), (2.0, 1.0), copies=4), {"base": "fedrod"} if name == "dbe" else {}
        algorithm = build_algorithm({"name": name, **base})
        with pytest.raises(UsageError) as error:
            check_trial(blueprint(algorithm, curves, model=net(), loss=quadratic, batch_size=2), curves)
        assert str(error.value) == f"algorithm.name={name}: needs data with classes; these labels are float32 [n, 2]"

    def test_width_needs_equal_batches(self):
        with pytest.raises(UsageError, match=r"placement.vmap_clients=2: .*client 1"):
            simulate(blueprint(FedAvg(), blobs(4), vmap_clients=2, drop_last=False), blobs(4))
        with pytest.raises(UsageError, match=r"placement.vmap_clients=2: .*client 0 .*local.batch_size=20 or less"):
            simulate(blueprint(FedAvg(), blobs(4), vmap_clients=2, batch_size=21), blobs(4))


BN = {f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
STATISTICS = {name for name in BN if "running" in name or "tracked" in name}


class TestBatchNorm:
    def run(self, policy, rounds=2):
        population = blobs(3)
        return simulate(
            blueprint(FedAvg(), population, batch_norm=policy, rounds=rounds), population, points=["downloaded"]
        )

    @pytest.mark.parametrize(
        ("policy", "kept"), [("aggregate", set()), ("local", BN), ("local_statistics", STATISTICS), ("frozen", BN)]
    )
    def test_what_travels_and_what_stays(self, policy, kept):
        server, records = self.run(policy)
        names = set(net().state_dict())
        assert set(server.state["weights"]) == names - kept
        sent = sum(net().state_dict()[name].nbytes for name in names - kept)
        assert records[0].bytes_up["weights"] == records[0].bytes_down["weights"] == 3 * sent
        states = server.fleet.states
        kept = set() if policy == "frozen" else kept  # constants, which nobody's state has
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
