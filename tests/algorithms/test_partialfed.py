"""PartialFed: what is loaded, the fixed variant by hand, and one step of the learnt choice."""

import copy

import pytest
import torch

from helpers.federations import net
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.partialfed import PartialFed
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.core.task import Batch

LOCAL = ("body.1.", "fc.")


def test_fix_by_hand():
    people, model = population(), net()
    server = run(PartialFed(), people, model)
    models, common = [model] * 3, model
    for _ in range(2):
        starts = []
        for own in models:
            start = copy.deepcopy(common)
            local = {name: v for name, v in own.state_dict().items() if name.startswith(LOCAL)}
            start.load_state_dict(common.state_dict() | local)
            starts.append(start)
        models = [descend(start, *data(people, i), 2) for i, start in zip(CLIENTS, starts, strict=True)]
        common = mean(models, shares(people))
    assert_weights(server.state["weights"], common)
    for i, state in server.fleet.states.items():
        assert {name.rpartition(".")[0] for name in state["local"]} == {"body.1", "fc"}
        assert_weights(state["local"], models[i])
        scored = server.algorithm.downloaded_model(server.ctx, state, {"weights": server.state["weights"]})
        assert torch.equal(scored["fc.weight"], state["local"]["fc.weight"])
        assert torch.equal(scored["body.0.weight"], server.state["weights"]["body.0.weight"])


def adaptive(**options):
    people = population()
    algorithm = PartialFed(variant="adaptive", **options)
    ctx = plan(algorithm, people, net(batch_norm=False)).context(people, "cpu")
    local = {name: v + 0.3 for name, v in ctx.task.initial_weights().items()}
    client = {"weights": {}, "local": local, "logits": torch.tensor([20.0, -20.0, 0.0])}
    return algorithm, ctx, client, {"weights": ctx.task.initial_weights()}, Batch(*data(people, 1))


def test_a_round_loads_what_the_logits_say_and_scores_with_the_likelier_choice():
    algorithm, ctx, client, down, _ = adaptive()
    drawn = set()
    for seed in range(20):
        torch.manual_seed(seed)
        weights = algorithm.start(ctx, client, down)["weights"]
        assert torch.equal(weights["body.0.weight"], down["weights"]["body.0.weight"])
        assert torch.equal(weights["body.3.weight"], client["local"]["body.3.weight"])
        drawn.add(torch.equal(weights["fc.weight"], down["weights"]["fc.weight"]))
    assert drawn == {True, False}
    scored = algorithm.downloaded_model(ctx, client, down)
    assert torch.equal(scored["fc.weight"], down["weights"]["fc.weight"])
    assert torch.equal(scored["body.3.weight"], client["local"]["body.3.weight"])


def test_batches_alternate_between_weights_and_choice():
    algorithm, ctx, client, down, batch = adaptive(policy_lr=0.5, temperature=2.0)
    client = client | {"logits": torch.tensor([0.2, -0.1, 0.4])}
    work = algorithm.start(ctx, client, down)
    before = {name: v.clone() for name, v in work["weights"].items()}
    torch.manual_seed(7)
    after, metrics = algorithm.step(ctx.at(step=1, optimizer=SGD(lr=0.1)), dict(work), down, batch)
    assert all(torch.equal(after["weights"][name], before[name]) for name in before)

    torch.manual_seed(7)
    u = torch.rand(3).clamp(1e-6, 1 - 1e-6)
    s = client["logits"].clone().requires_grad_()
    soft = torch.sigmoid((s + torch.log(u / (1 - u))) / 2.0)
    a = (soft > 0.5).float().detach() + soft - soft.detach()
    model = net(batch_norm=False)
    where = {"body.0": 0, "body.3": 1, "fc": 2}
    weights = {
        name: a[where[name.rpartition(".")[0]]] * down["weights"][name]
        + (1 - a[where[name.rpartition(".")[0]]]) * client["local"][name]
        for name in weights_of(model)
    }
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, weights, (batch.x,)), batch.y)
    (grad,) = torch.autograd.grad(loss, s)
    torch.testing.assert_close(after["logits"], client["logits"] - 0.5 * grad, rtol=1e-4, atol=1e-6)
    assert metrics["policy_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert grad.abs().max() > 0

    after, metrics = algorithm.step(ctx.at(step=2), dict(work), down, batch)
    assert torch.equal(after["logits"], client["logits"])
    assert "loss" in metrics
    assert not torch.equal(after["weights"]["fc.weight"], before["fc.weight"])
