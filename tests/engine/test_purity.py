"""Hooks that modify their inputs are refused while a simulation runs."""

from dataclasses import dataclass

import pytest
import torch

from helpers.federations import blobs, blueprint, new_server, simulate
from rayfed.algorithms.fedavg import FedAvg
from rayfed.engine.purity import ImpureHook, facts
from rayfed.engine.serialization import state_hash

POINT = ["downloaded"]  # where batch norm stays with the clients there is no global model


@dataclass(frozen=True, kw_only=True)
class Impure(FedAvg):
    where: str = ""

    def touch(self, where, weights):
        if self.where == where:
            next(iter(weights.values())).add_(1)

    def broadcast(self, ctx, server):
        self.touch("broadcast", server["weights"])
        return super().broadcast(ctx, server)

    def step(self, ctx, work, down, batch):
        self.touch("step", down["weights"])
        self.touch("step of work", work["weights"])
        return super().step(ctx, work, down, batch)

    def finish(self, ctx, work, client, down, data):
        self.touch("finish", down["weights"])
        self.touch("finish of client", client["weights"])
        return super().finish(ctx, work, client, down, data)

    def aggregate(self, ctx, server, replies):
        self.touch("aggregate", server["weights"])
        return super().aggregate(ctx, server, replies)


class TestPurity:
    def run(self, where):
        population = blobs(2)
        return simulate(
            blueprint(Impure(where=where), population, batch_norm="local", rounds=1), population, points=POINT
        )

    @pytest.mark.parametrize(
        ("where", "hook", "lent"),
        [
            ("broadcast", "broadcast", "server"),
            ("step", "step", "down"),
            ("finish", "finish", "down"),
            ("finish of client", "finish", "client"),
            ("aggregate", "aggregate", "server"),
        ],
    )
    def test_changing_what_is_lent_is_told(self, where, hook, lent):
        with pytest.raises(ImpureHook, match=rf"Impure\.{hook} changed `{lent}` in place.*x = x \+ y.*clone"):
            self.run(where)

    def test_work_is_private(self):
        self.run("step of work")

    def test_start_may_share_its_arguments(self):
        """FedAvg's work begins as the download itself; that the steps change it in place must not be seen there."""
        population = blobs(2)
        plan = blueprint(FedAvg(), population, rounds=1)
        server = new_server(plan, population)
        before = state_hash(server.state)
        kept = server.state
        list(server.run())
        assert state_hash(kept) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8])
def test_facts_tell_every_bit_of_a_tensor_of_any_dtype(dtype):
    zeros = torch.zeros(3, dtype=dtype)
    changed = zeros.clone()
    changed[1] = 1
    assert facts({"a": zeros}) == facts({"a": zeros.clone()}) != facts({"a": changed})
