"""FedProto: two rounds by hand, the server's means, the nearest prototype, what is sent."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, data, plan, population, run
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.fedproto import FedProto


def train(model, x, y, prototypes, lam, steps=2):
    """(trained copy, class means of the features that the steps saw, class counts)."""
    model = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    seen = []
    for _ in range(steps):
        z = model.features(x)
        seen.append(z.detach())
        loss = F.cross_entropy(model.head(z), y)
        rows = [i for i, c in enumerate(y.tolist()) if c in prototypes]
        if rows:
            targets = torch.stack([prototypes[int(y[i])] for i in rows])
            loss = loss + lam * ((z[rows] - targets) ** 2).mean(1).sum() / len(y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    z, labels = torch.cat(seen), y.repeat(steps)
    return model, {c: z[labels == c].mean(0) for c in set(y.tolist())}, {c: int((labels == c).sum()) for c in range(3)}


@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_two_rounds_by_hand(weighting):
    people, model = population(), net(batch_norm=False)
    server = run(FedProto(lam=0.7, weighting=weighting), people, model)
    models, prototypes = [model] * 3, {}
    for _ in range(2):
        trained = [train(models[i], *data(people, i), prototypes, 0.7) for i in CLIENTS]
        models = [one[0] for one in trained]
        for c in range(3):
            owners = [
                (means[c], counts[c] if weighting == "examples" else 1) for _, means, counts in trained if c in means
            ]
            prototypes[c] = sum(w * m for m, w in owners) / sum(w for _, w in owners)
    for i, state in server.fleet.states.items():
        assert_weights(state["weights"], models[i])
    found = server.state["prototypes"]
    assert found["known"].tolist() == [1, 1, 1]
    torch.testing.assert_close(found["means"], torch.stack([prototypes[c] for c in range(3)]), rtol=1e-5, atol=1e-6)


def test_the_server_keeps_what_nobody_sent():
    people = population()
    algorithm = FedProto()
    ctx = plan(algorithm, people, net()).context(people, "cpu")
    old = {"means": torch.full((3, 8), 5.0), "known": torch.tensor([0.0, 1.0, 1.0])}

    def reply(i, counts, value):
        means = torch.full((3, 8), value)
        return Reply(i, 9, {"prototypes": {"means": means, "counts": torch.tensor(counts)}})

    replies = Replies({"weights": {}}, [reply(0, [3.0, 0.0, 1.0], 1.0), reply(1, [1.0, 0.0, 0.0], 3.0)])
    found = algorithm.aggregate(ctx, {"weights": {}, "prototypes": old}, replies)["prototypes"]
    assert found["means"][:, 0].tolist() == [2.0, 5.0, 1.0]
    assert found["known"].tolist() == [1, 1, 1]
    weighted = FedProto(weighting="examples").aggregate(ctx, {"weights": {}, "prototypes": old}, replies)["prototypes"]
    assert weighted["means"][:, 0].tolist() == [1.5, 5.0, 1.0]


def test_the_nearest_prototype_wins_and_unknown_classes_never_do():
    people = population()
    algorithm, model = FedProto(), net()
    ctx = plan(algorithm, people, model).context(people, "cpu")
    weights, x = ctx.task.initial_weights(), data(people, 0)[0]
    z = ctx.task.represent(weights, x)
    means = torch.stack([z[2], z[5], z[0]])
    for known in ([1.0, 1.0, 1.0], [1.0, 1.0, 0.0]):
        prototypes = {"means": means, "known": torch.tensor(known)}
        logits = algorithm.predict(ctx, {"weights": weights, "prototypes": prototypes}, x)
        distances = torch.cdist(z, means[: int(sum(known))])
        assert torch.equal(logits.argmax(1), distances.argmin(1))
        assert torch.isfinite(logits).all()
    nothing = {"means": means, "known": torch.zeros(3)}
    logits = algorithm.predict(ctx, {"weights": weights, "prototypes": nothing}, x)
    assert torch.equal(logits, ctx.task.predict(weights, x))
