"""GroupDRO: q by hand, over rounds, with everyone and with sampled clients."""

import math

import torch

from helpers.federations import net
from helpers.reference import CLIENTS, assert_weights, cross_entropy, data, descend, mean, population, run
from rayfed.algorithms.group_dro import GroupDRO


def test_three_rounds_by_hand():
    people, model = population(), net(batch_norm=False)
    server = run(GroupDRO(q_lr=0.5), people, model, rounds=3)
    q = [1.0, 1.0, 1.0]
    for _ in range(3):
        losses = [cross_entropy(model, *data(people, i)).item() for i in CLIENTS]
        q = [old * math.exp(0.5 * loss) for old, loss in zip(q, losses, strict=True)]
        model = mean([descend(model, *data(people, i), 2) for i in CLIENTS], [each / sum(q) for each in q])
    assert_weights(server.state["weights"], model)
    torch.testing.assert_close(server.state["log_q"].exp(), torch.tensor(q, dtype=torch.float64), rtol=1e-5, atol=0)


def test_q_does_not_overflow():
    people = population()
    server = run(GroupDRO(q_lr=1e4), people, net(batch_norm=False), rounds=2)
    assert all(torch.isfinite(value).all() for value in server.state["weights"].values())


def test_sampled_rounds_by_hand():
    people, model = population(), net(batch_norm=False)
    server = run(GroupDRO(q_lr=0.5), people, model, rounds=3, cohort=2)
    cohorts = [server.sample(number) for number in (1, 2, 3)]
    assert len(set(cohorts)) > 1
    q = [1.0, 1.0, 1.0]
    for cohort in cohorts:
        for i in cohort:
            q[i] *= math.exp(0.5 * cross_entropy(model, *data(people, i)).item())
        total = sum(q[i] for i in cohort)
        model = mean([descend(model, *data(people, i), 2) for i in cohort], [q[i] / total for i in cohort])
    assert_weights(server.state["weights"], model)
    torch.testing.assert_close(server.state["log_q"].exp(), torch.tensor(q, dtype=torch.float64), rtol=1e-5, atol=0)
