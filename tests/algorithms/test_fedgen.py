"""FedGen: counts once, the client's loss and the generator's training by hand, with and without DBE."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import CLIENTS, LR, data, plan, population
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.fedgen import FeatureGenerator, FedGen, draw_classes
from rayfed.core.network import weights_of
from rayfed.core.task import Batch

HEAD = ("fc.weight", "fc.bias")


def small(**options):
    return FedGen(**({"noise": 4, "hidden": 6, "server_steps": 3} | options))


def test_classes_are_drawn_in_proportion():
    torch.manual_seed(0)
    y = draw_classes(torch.tensor([30.0, 0.0, 10.0, 60.0]), 20_000)
    found = torch.bincount(y, minlength=4) / len(y)
    assert found[1] == 0
    torch.testing.assert_close(found, torch.tensor([0.3, 0.0, 0.1, 0.6]), rtol=0, atol=0.02)


def test_the_clients_loss():
    people, algorithm = population(), small()
    model = net(batch_norm=False)
    ctx = plan(algorithm, people, model).context(people, "cpu")
    torch.manual_seed(0)
    generator = ctx.task.modules["generator"].draw_weights()
    down = {"weights": ctx.task.initial_weights(), "generator": generator, "counts": torch.tensor([5.0, 3.0, 2.0])}
    x, y = data(people, 0)
    torch.manual_seed(5)
    work = algorithm.start(ctx, {"weights": {}}, down)
    work, metrics = algorithm.step(ctx, {**work, "weights": dict(weights_of(model))}, down, Batch(x, y))
    torch.manual_seed(5)
    label = draw_classes(down["counts"], ctx.batch_size)
    noise = torch.rand(ctx.batch_size, 4)
    by_hand = FeatureGenerator(4, 6, 3, (8,))
    by_hand.load_state_dict(generator)
    features = by_hand.layers(torch.cat([noise, F.one_hot(label, 3).float()], 1)).detach()
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model.head(features), label)
    loss.backward()
    assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(work["weights"][name], parameter.detach() - LR * parameter.grad)


def test_the_servers_training_of_the_generator_by_hand():
    people, algorithm = population(), small(server_lr=0.05)
    ctx = plan(algorithm, people, net(batch_norm=False)).context(people, "cpu")
    torch.manual_seed(0)
    server = algorithm.init(ctx) | {"counts": torch.tensor([4.0, 1.0, 5.0])}
    heads = [{"fc.weight": torch.randn(3, 8), "fc.bias": torch.randn(3)} for _ in CLIENTS]
    rest = {name: v for name, v in server["weights"].items() if name not in HEAD}
    replies = Replies({"weights": rest}, [Reply(i, 8 + i, {"head": heads[i]}) for i in CLIENTS])
    p = torch.tensor([8.0, 9.0, 10.0]) / 27
    by_hand = FeatureGenerator(4, 6, 3, (8,))
    by_hand.load_state_dict(server["generator"])
    adam = torch.optim.Adam(by_hand.parameters(), lr=0.05)
    torch.manual_seed(9)
    found = algorithm.aggregate(ctx, server, replies)
    found = algorithm.aggregate(ctx, found, replies)
    torch.manual_seed(9)
    losses = []
    for _ in range(6):  # two rounds of three; the moments go on
        y = draw_classes(server["counts"], ctx.batch_size)
        z = by_hand(torch.rand(len(y), 4), y)
        logits = sum(share * F.linear(z, h["fc.weight"], h["fc.bias"]) for share, h in zip(p, heads, strict=True))
        adam.zero_grad()
        losses.append(F.cross_entropy(logits, y))
        losses[-1].backward()
        adam.step()
    assert found["generator_loss"].item() == pytest.approx(sum(losses[3:]).item() / 3, rel=1e-3)
    for name, value in by_hand.state_dict().items():
        if name != "layers.0.bias":  # batch norm takes it away: its gradient is rounding, which Adam blows up
            torch.testing.assert_close(found["generator"][name], value, rtol=1e-3, atol=1e-5)
    mean = sum(share * h["fc.weight"] for share, h in zip(p, heads, strict=True))
    torch.testing.assert_close(found["weights"]["fc.weight"], mean)
