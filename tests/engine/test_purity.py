"""Hooks that modify their inputs are refused while a simulation runs; `pure` sees also what torch does not count."""

from dataclasses import dataclass

import pytest
import torch

from helpers.federations import blobs, blueprint, new_server, simulate
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.trees import state_hash
from rayfed.engine.purity import ImpureHook, facts, intercepted, pure

POINT = ["downloaded"]  # where batch norm stays with the clients there is no global model


@dataclass(frozen=True, kw_only=True)
class Impure(FedAvg):
    """Changes what it is lent `where`; hidden from torch's counters of changes in place, or not."""

    where: str = ""
    hidden: bool = False

    def touch(self, where, tensor):
        if self.where == where:
            (tensor.data if self.hidden else tensor).add_(1)

    def broadcast(self, ctx, server):
        self.touch("server of broadcast", server["weights"]["fc.bias"])
        return super().broadcast(ctx, server)

    def start(self, ctx, client, down):
        self.touch("initial weights", ctx.task.initial_weights()["fc.bias"])
        return super().start(ctx, client, down)

    def step(self, ctx, work, down, batch):
        self.touch("down of step", down["weights"]["fc.bias"])
        self.touch("work", work["weights"]["fc.bias"])
        self.touch("batch", batch.x)
        self.touch("template", next(ctx.task.model.module.parameters()))
        if self.where == "attribute":
            object.__setattr__(self, "seen", True)
        return super().step(ctx, work, down, batch)

    def finish(self, ctx, work, client, down, data):
        self.touch("down of finish", down["weights"]["fc.bias"])
        self.touch("client", client["weights"].get("body.1.bias"))
        self.touch("data", data.train.y)
        return super().finish(ctx, work, client, down, data)

    def aggregate(self, ctx, server, replies):
        self.touch("server", server["weights"]["fc.bias"])
        self.touch("replies", replies.mean["weights"]["fc.bias"])
        if self.where == "keys":
            server["more"] = torch.zeros(1)
        return super().aggregate(ctx, server, replies)


def run(where):
    people = blobs(2)
    return simulate(blueprint(Impure(where=where), people, batch_norm="local", rounds=1), people, points=POINT)


@pytest.mark.parametrize(
    ("where", "hook", "lent"),
    [
        ("server of broadcast", "broadcast", "server"),
        ("down of step", "step", "down"),
        ("down of finish", "finish", "down"),
        ("client", "finish", "client"),
        ("server", "aggregate", "server"),
    ],
)
def test_changing_what_is_lent_is_told(where, hook, lent):
    with pytest.raises(ImpureHook, match=rf"Impure\.{hook} changed `{lent}` in place.*x = x \+ y.*clone"):
        run(where)


@pytest.mark.parametrize(
    ("where", "hook"),
    [
        *(("server", "aggregate"), ("replies", "aggregate"), ("keys", "aggregate"), ("batch", "step")),
        *(("attribute", "step"), ("template", "step"), ("data", "finish"), ("down of finish", "finish")),
        ("initial weights", "start"),
    ],
)
def test_what_torchs_counters_do_not_see_is_told_by_pure(where, hook):
    people = blobs(2)  # its own, since the hook may overwrite the data
    plan = blueprint(intercepted(Impure(where=where, hidden=True), pure), people)
    with pytest.raises(ImpureHook, match=f"^{hook} changed"):
        list(new_server(plan, people).run())


def test_a_hook_that_changes_nothing_passes_whatever_its_steps_leave_in_the_network():
    people = blobs(2)
    plan = blueprint(intercepted(FedAvg(), pure), people, rounds=2)
    plain = blueprint(FedAvg(), people, rounds=2)
    servers = [new_server(plan, people), new_server(plain, people)]
    hashes = []
    for server in servers:
        list(server.run())
        hashes.append(state_hash(server.state))
    assert hashes[0] == hashes[1]


def test_work_is_private():
    run("work")


def test_start_may_share_its_arguments():
    """FedAvg's work begins as the download itself; that the steps change it in place must not be seen there."""
    people = blobs(2)
    server = new_server(blueprint(FedAvg(), people, rounds=1), people)
    kept, before = server.state, state_hash(server.state)
    list(server.run())
    assert state_hash(kept) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8])
def test_facts_tell_every_bit_of_a_tensor_of_any_dtype(dtype):
    zeros = torch.zeros(3, dtype=dtype)
    changed = zeros.clone()
    changed[1] = 1
    assert facts({"a": zeros}) == facts({"a": zeros.clone()}) != facts({"a": changed})
