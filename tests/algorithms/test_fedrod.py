"""FedRoD: a generic head by the balanced loss, a personal one on top."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net, simulate
from helpers.reference import CLIENTS, LR, assert_weights, data, mean, plan, population, run, shares
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedrod import FedRoD
from rayfed.core.optim import SGD, Adam


def one_round(model, own, x, y, steps, gamma, optimizer):
    model, own = copy.deepcopy(model).train(), copy.deepcopy(own)
    counts = torch.tensor([(y == c).sum() for c in range(3)]).float()
    sgd = optimizer([*model.parameters(), *own.parameters()])
    for _ in range(steps):
        z = model.features(x)
        logits = model.head(z)
        weighed = counts**gamma * logits.exp()
        balanced = -(weighed.gather(1, y[:, None]).squeeze(1) / weighed.sum(1)).log().mean()
        personal = F.cross_entropy(logits.detach() + own(z.detach()), y)
        sgd.zero_grad()
        (balanced + personal).backward()
        sgd.step()
    return model, own


@pytest.mark.parametrize(
    ("gamma", "ours", "theirs"),
    [
        (1.0, SGD(lr=LR), lambda p: torch.optim.SGD(p, lr=LR)),
        (0.5, Adam(lr=0.01, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3)),
    ],
)
def test_two_rounds_by_hand(gamma, ours, theirs):
    people, model = population(), net()
    server = run(FedRoD(gamma=gamma), people, model, steps=2, optimizer=ours)
    heads = [model.fc] * 3
    for _ in range(2):
        pairs = [one_round(model, heads[i], *data(people, i), 2, gamma, theirs) for i in CLIENTS]
        model, heads = mean([m for m, _ in pairs], shares(people)), [own for _, own in pairs]
    assert_weights(server.state["weights"], model, atol=1e-5)
    for i, state in server.fleet.states.items():
        own = {name.removeprefix("personal.fc."): value for name, value in state["weights"].items()}
        assert set(own) == {"weight", "bias"}
        assert_weights(own, heads[i], atol=1e-5)


def test_an_absent_class_leaves_the_loss_finite_and_its_logit_alone():
    people = population()
    present = people.clients[0].train.y
    present[present == 2] = 1
    server = run(FedRoD(), people, net(), rounds=1)
    assert server.fleet.states[0]["counts"].tolist() == [int((present == c).sum()) for c in range(3)]
    ctx, algorithm = server.ctx, server.algorithm
    client, down = server.fleet.states[0], algorithm.broadcast(ctx, server.state)
    work = algorithm.start(ctx, client, down)
    x, y = data(people, 0)
    before = work["weights"]["fc.bias"].clone()
    work, metrics = algorithm.step(ctx, work, down, type("B", (), {"x": x, "y": y}))
    assert torch.isfinite(metrics["loss"])
    assert abs(work["weights"]["fc.bias"][2] - before[2]) < 1e-8  # no push away from a class that is not there
    assert abs(work["weights"]["fc.bias"][1] - before[1]) > 1e-4


def test_both_heads_predict_and_the_server_has_one():
    people = population()
    server, records = simulate(plan(FedRoD(), people, net()), people, points=("global", "downloaded"))
    state = server.fleet.states[1]
    model = copy.deepcopy(net()).eval()
    model.load_state_dict(server.state["weights"])
    test = people.clients[1].test
    x, y = torch.from_numpy(test.x), torch.from_numpy(test.y)
    z = model.features(x)
    own = F.linear(z, state["weights"]["personal.fc.weight"], state["weights"]["personal.fc.bias"])
    found = {(s.point, s.client, s.split, s.metric): s.value for s in records[-1].scores}
    both, one = (F.cross_entropy(logits, y).item() for logits in (model.head(z) + own, model.head(z)))
    assert found["downloaded", 1, "test", "loss"] == pytest.approx(both, abs=1e-6)
    assert found["global", 1, "test", "loss"] == pytest.approx(one, abs=1e-6)
    assert both != pytest.approx(one, abs=1e-3)


def test_under_dbe_there_is_one_personal_bias_with_plain_steps():
    """Both heads read z + b. The bias b follows the balanced loss by SGD, the other weights have momentum and decay."""
    people, model = population(), net(batch_norm=False)
    ours = SGD(lr=LR, momentum=0.9, weight_decay=0.01)
    server = run(DBE(base=FedRoD(), mr=False), people, model, steps=3, rounds=1, optimizer=ours)
    x, y = data(people, 0)
    counts = torch.tensor([(y == c).sum() for c in range(3)]).float()
    trained, own, bias = copy.deepcopy(model), copy.deepcopy(model.fc), torch.zeros(8, requires_grad=True)
    sgd = torch.optim.SGD([*trained.parameters(), *own.parameters()], lr=LR, momentum=0.9, weight_decay=0.01)
    plain = torch.optim.SGD([bias], lr=LR)
    for _ in range(3):
        z = trained.features(x) + bias
        logits = trained.head(z)
        loss = F.cross_entropy(logits + counts.clamp(min=1e-9).log(), y)
        loss = loss + F.cross_entropy(logits.detach() + own(z.detach()), y)
        sgd.zero_grad()
        plain.zero_grad()
        loss.backward()
        sgd.step()
        plain.step()
    kept = server.fleet.states[0]["weights"]
    assert set(kept) == {"dbe.bias", "personal.fc.weight", "personal.fc.bias"}
    torch.testing.assert_close(kept["dbe.bias"], bias.detach())
    torch.testing.assert_close(kept["personal.fc.weight"], own.weight.detach())
    torch.testing.assert_close(kept["personal.fc.bias"], own.bias.detach())
    ctx, down = server.ctx.at(client=0), server.algorithm.broadcast(server.ctx, server.state)
    scored = server.algorithm.downloaded_model(ctx, server.fleet.states[0], down)
    received = copy.deepcopy(model)
    received.load_state_dict(server.state["weights"])
    z = received.features(x) + bias
    torch.testing.assert_close(server.algorithm.predict(ctx, scored, x), received.fc(z) + own(z))
