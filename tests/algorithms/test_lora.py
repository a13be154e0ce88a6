"""LoRA with clients of different ranks: FLoRA's stacked products, HetLoRA's padding and pruning; and FedSA-LoRA."""

import copy

import pytest
import torch
from torch import nn

from helpers.federations import adapted, net
from helpers.reference import data, descend, population, run, shares
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.lora import FLoRA, HetLoRA
from rayfed.core.errors import UsageError
from rayfed.engine.purity import intercepted
from rayfed.experiments.config import Config

A, B, W = (f"body.0.{end}weight" for end in ("lora_A.default.", "lora_B.default.", "base_layer."))
S = 8 / 4  # alpha / rank


def spied(algorithm):
    """Return the algorithm, and a list that gets the work before training and what was sent of each client in turn."""
    seen = []

    def spy(name, hook, self, *args, **kwargs):
        result = hook(self, *args, **kwargs)
        if name == "start":
            seen.append([copy.deepcopy(result["weights"])])
        if name == "finish":
            seen[-1].append(result[1])
        return result

    return intercepted(algorithm, spy), seen


def filled_in(weights):
    """A model with `weights`, whose adapters may have any rank."""
    model = adapted(net(batch_norm=False))
    layer = model.body[0]
    layer.lora_A["default"].weight = nn.Parameter(weights[A].clone())
    layer.lora_B["default"].weight = nn.Parameter(weights[B].clone())
    layer.base_layer.weight = nn.Parameter(weights[W].clone(), requires_grad=False)
    others = {name: value for name, value in weights.items() if name not in (A, B, W)}
    model.load_state_dict(others, strict=False)
    return model


def test_floras_base_gets_the_mean_of_the_clients_products():
    people, model, ranks = population(), adapted(net(batch_norm=False)), [1, 3, 2]
    algorithm, seen = spied(FLoRA(ranks=ranks))
    server = run(algorithm, people, model, rounds=1)
    total, means = torch.zeros(12, 6), []
    for i, (before, up) in enumerate(seen):
        assert before[A].shape == (ranks[i], 6)
        assert before[A].abs().min() > 0
        assert not before[B].any()
        trained = descend(filled_in(before), *data(people, i), 2)  # by torch, from what was drawn
        factors = {A: trained.body[0].lora_A["default"].weight, B: trained.body[0].lora_B["default"].weight}
        assert up["factors"].keys() == {A, B}
        for name, value in factors.items():
            torch.testing.assert_close(up["factors"][name], value.detach(), atol=1e-6, rtol=1e-5)
        total += shares(people)[i] * S * factors[B].detach() @ factors[A].detach()
        means.append(shares(people)[i] * trained.fc.weight.detach())
    end = server.state["weights"]
    assert A not in end
    assert total.abs().max() > 1e-4
    torch.testing.assert_close(end[W], model.body[0].base_layer.weight + total, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(end["fc.weight"], sum(means), atol=1e-6, rtol=1e-5)
    sent = [sum(value.numel() for value in up["factors"].values()) for _, up in seen]
    assert sent == [18 * rank for rank in ranks]


def test_floras_merged_base_gives_the_outputs_of_the_adapters():
    people, model = population((20,)), adapted(net(batch_norm=False))
    algorithm, seen = spied(FLoRA())
    server = run(algorithm, people, model, rounds=2)
    (before, _), (after, up) = seen
    x = data(people, 0)[0]
    own = filled_in(after | up["factors"] | up["weights"])  # with the base of the second round
    merged = server.ctx.task.predict(server.algorithm.global_model(server.ctx, server.state), x)
    torch.testing.assert_close(merged, own(x).detach(), atol=1e-6, rtol=1e-5)
    assert not torch.equal(before[A], after[A])  # drawn anew


def test_floras_bytes_of_the_paper():
    people, model = population(), adapted(net(batch_norm=False))
    server = run(FLoRA(ranks=[1, 3, 2]), people, model, rounds=1)
    ctx = server.ctx.at(cohort=(0, 2))
    others = sum(
        value.numel() for name, value in model.named_parameters() if value.requires_grad and name not in (A, B)
    )
    assert server.algorithm.bytes_formula(ctx, [1, 1]) == 4 * ((2 + 1) * 18 * (1 + 2) + 2 * 2 * others)


def test_het_lora_fills_up_and_weighs_by_the_norm_of_the_product():
    server = run(HetLoRA(), population(), adapted(net(batch_norm=False)), rounds=0)
    own = [(torch.ones(1, 6), torch.ones(12, 1)), (2 * torch.ones(2, 6), torch.ones(12, 2))]
    # ‖B A‖: every entry is 1, or 2 · 2 = 4; the shares are 1/5 and 4/5
    replies = [Reply(i, 10 + i, {"factors": {A: a, B: b}}) for i, (a, b) in enumerate(own)]
    state = server.algorithm.aggregate(server.ctx, server.state, Replies({"weights": {}}, replies))
    rows, columns = state["factors"][A], state["factors"][B]
    torch.testing.assert_close(rows[:, 0], torch.tensor([0.2 + 1.6, 1.6, 0, 0]))
    torch.testing.assert_close(columns[0], torch.tensor([0.2 + 0.8, 0.8, 0, 0]))
    assert state["ranks"].tolist() == [1, 2, 4]


def test_het_lora_trains_the_first_ranks_and_sends_no_others():
    people, model, ranks = population(), adapted(net(batch_norm=False)), [2, 4, 1]
    nn.init.normal_(model.body[0].lora_B["default"].weight, std=0.1)
    algorithm, seen = spied(HetLoRA(ranks=ranks, gamma=1.0))
    server = run(algorithm, people, model, rounds=1)
    for i, ((before, up), rank) in enumerate(zip(seen, ranks, strict=True)):
        assert torch.equal(before[A], model.body[0].lora_A["default"].weight[:rank])
        assert torch.equal(before[B], model.body[0].lora_B["default"].weight[:, :rank])
        trained = descend(filled_in(before | {W: model.body[0].base_layer.weight}), *data(people, i), 2)
        torch.testing.assert_close(
            up["factors"][B], trained.body[0].lora_B["default"].weight.detach(), atol=1e-6, rtol=1e-5
        )
        assert sum(value.numel() for value in up["factors"].values()) == 18 * rank
    assert server.state["ranks"].tolist() == ranks
    model = server.algorithm.downloaded_model(server.ctx, {"weights": {}}, server.state | seen_by(server, 2))
    assert model[A].shape == (4, 6)


def seen_by(server, client):
    return server.algorithm.unicast(server.ctx.at(client=client), server.state)


def test_het_lora_prunes_ranks_that_have_become_smaller():
    people, model = population((20, 20, 20)), adapted(net(batch_norm=False))
    nn.init.normal_(model.body[0].lora_B["default"].weight, std=0.1)
    algorithm, seen = spied(HetLoRA(gamma=0.5, lam=1.0))
    server = run(algorithm, people, model, rounds=1)

    def penalised(own, x, y):
        layer = own.body[0]
        last = layer.lora_B["default"].weight[:, 2:].norm() * layer.lora_A["default"].weight[2:].norm()
        return nn.functional.cross_entropy(own(x), y) + last

    for i, (before, up) in enumerate(seen):
        trained = descend(filled_in(before | {W: model.body[0].base_layer.weight}), *data(people, i), 2, loss=penalised)
        expected = trained.body[0].lora_A["default"].weight.detach()[:2]
        torch.testing.assert_close(up["factors"][A], expected, atol=1e-6, rtol=1e-5)
    assert server.state["ranks"].tolist() == [2, 2, 2]
    assert seen_by(server, 1)["factors"][B].shape == (12, 2)
    kept = run(HetLoRA(gamma=0.5, lam=0.0), people, model, rounds=1)
    assert max(kept.state["ranks"].tolist()) == 4  # without the term, some grow


def test_fedsa_lora_averages_a_and_keeps_b():
    people, model = population(), adapted(net(batch_norm=False))
    algorithm = Config.read({"algorithm": {"name": "fedavg", "personal": "*lora_B*"}}).algorithm
    server = run(algorithm, people, model, rounds=1)
    trained = [descend(model, *data(people, i), 2) for i in range(3)]
    mean = sum(
        p * own.body[0].lora_A["default"].weight.detach() for p, own in zip(shares(people), trained, strict=True)
    )
    torch.testing.assert_close(server.state["weights"][A], mean, atol=1e-6, rtol=1e-5)
    assert B not in server.state["weights"]
    for i, own in enumerate(trained):
        kept = server.fleet.states[i]["weights"][B]
        torch.testing.assert_close(kept, own.body[0].lora_B["default"].weight.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "model", "changes", "message"),
    [
        (FLoRA(), net(), {}, "algorithm.name=flora: needs both factors .*; finds no LoRA"),
        (HetLoRA(ranks=[2, 5]), adapted(net()), {}, r"algorithm.ranks=\[2, 5\]: the model's LoRA has rank 4"),
        (HetLoRA(), adapted(net()), {"vmap_clients": 2}, "placement.vmap_clients=2: clients of"),
    ],
)
def test_refusals(algorithm, model, changes, message):
    with pytest.raises(UsageError, match="^" + message):
        run(algorithm, population((20, 20, 20)), model, batch_size=10, **changes)
    half = adapted(net())
    half.body[0].lora_A["default"].weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"needs both factors A and B of linear layers trained .*; finds .*lora_B"):
        run(FLoRA(), population(), half)
    bare = adapted(net())
    del bare.body[0].scaling  # as in an adapter that is not peft's
    with pytest.raises(AttributeError, match="'Adapter' object has no attribute 'scaling'"):
        run(FLoRA(), population(), bare)
