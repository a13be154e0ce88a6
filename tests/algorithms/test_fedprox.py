"""FedProx against torch.optim on f + μ/2‖w − w_t‖²."""

import torch

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, cross_entropy, data, descend, mean, population, run, shares
from rayfed.algorithms.fedprox import FedProx, pulled
from rayfed.core.optim import SGD


def proximal(anchor, mu, without=()):
    fixed = {name: p.detach().clone() for name, p in anchor.named_parameters() if name not in without}

    def loss(model, x, y):
        distance = sum(((p - fixed[name]) ** 2).sum() for name, p in model.named_parameters() if name in fixed)
        return cross_entropy(model, x, y) + mu / 2 * distance

    return loss


def test_two_rounds_by_hand():
    people, model = population(), net()
    server = run(FedProx(mu=0.7), people, model, steps=3, optimizer=SGD(lr=LR, momentum=0.9, weight_decay=0.01))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=0.01)

    for _ in range(2):
        locals_ = [descend(model, *data(people, i), 3, loss=proximal(model, 0.7), optimizer=sgd) for i in CLIENTS]
        model = mean(locals_, shares(people))
    assert_weights(server.state["weights"], model)


def test_a_buffer_that_the_pull_is_added_to_in_place_is_the_same_rule():
    people, model = population(), net(batch_norm=False)
    server = run(FedProx(mu=0.3), people, model, steps=4, rounds=1, optimizer=SGD(lr=LR, momentum=0.9))
    trained = []
    for i in CLIENTS:
        local = descend(model, *data(people, i), 0)
        buffers = [torch.zeros_like(p) for p in local.parameters()]
        for _ in range(4):
            grads = torch.autograd.grad(cross_entropy(local, *data(people, i)), list(local.parameters()))
            with torch.no_grad():
                for p, start, b, g in zip(local.parameters(), model.parameters(), buffers, grads, strict=True):
                    b.mul_(0.9).add_(g)
                    b.add_(0.3 * (p - start))
                    p.sub_(LR * b)
        trained.append(local)
    assert_weights(server.state["weights"], mean(trained, shares(people)))


def test_weights_that_are_not_sent_are_not_pulled():
    grads = {"a": torch.tensor([1.0]), "own": torch.tensor([1.0])}
    weights = {"a": torch.tensor([3.0]), "own": torch.tensor([3.0]), "still": torch.tensor([3.0])}
    found = pulled(grads, weights, {"a": torch.tensor([1.0]), "still": torch.tensor([0.0])}, 0.5)
    assert found == {"a": torch.tensor([2.0]), "own": torch.tensor([1.0])}


def test_local_batch_norm_trains_unpulled():
    people, model = population(), net()
    server = run(FedProx(mu=0.7), people, model, steps=3, rounds=1, batch_norm="local")
    own = server.ctx.task.batch_norm_names
    trained = [descend(model, *data(people, i), 3, loss=proximal(model, 0.7, without=own)) for i in CLIENTS]
    assert_weights(server.state["weights"], mean(trained, shares(people)))
    for i, state in server.fleet.states.items():
        assert set(state["weights"]) == own
        assert_weights(state["weights"], trained[i])
