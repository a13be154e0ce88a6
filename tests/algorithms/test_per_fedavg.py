"""Per-FedAvg: one step of each form by hand, its batches, and what is scored."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, net, simulate
from helpers.reference import LR, batch, data, descend, plan, population
from rayfed.algorithms.per_fedavg import PerFedAvg, split
from rayfed.core.errors import UsageError
from rayfed.core.task import Batch
from rayfed.core.trees import clone
from rayfed.experiments.checks import check_trial


def at_work(algorithm, **changes):
    people = population()
    ctx = plan(algorithm, people, net(batch_norm=False), **changes).context(people, "cpu").at(round=1, client=0)
    down = algorithm.broadcast(ctx, algorithm.init(ctx))
    return ctx, down, clone(algorithm.start(ctx, algorithm.join(ctx), down))


def loss_at(weights, part):
    return F.cross_entropy(torch.func.functional_call(net(batch_norm=False), weights, (part.x,)), part.y)


def leaves():
    return {name: p.detach().clone().requires_grad_() for name, p in net(batch_norm=False).named_parameters()}


def meta_gradient(batch, parts, alpha, *, second_order):
    """The gradient of f(w − α ∇f(w; b); b'), by autograd, with or without what flows through ∇f; the Hessian's b''."""
    pieces = [Batch(x, y) for x, y in zip(batch.x.chunk(parts), batch.y.chunk(parts), strict=True)]
    weights = leaves()
    names = list(weights)
    first = torch.autograd.grad(loss_at(weights, pieces[0]), list(weights.values()))
    ahead = {n: (weights[n] - alpha * g).detach().requires_grad_() for n, g in zip(names, first, strict=True)}
    loss = loss_at(ahead, pieces[1])
    grads = torch.autograd.grad(loss, list(ahead.values()))
    if second_order:
        slope = torch.autograd.grad(loss_at(weights, pieces[2]), list(weights.values()), create_graph=True)
        along = sum((s * g).sum() for s, g in zip(slope, grads, strict=True))
        hessian = torch.autograd.grad(along, list(weights.values()))
        grads = [g - alpha * h for g, h in zip(grads, hessian, strict=True)]
    return dict(zip(names, grads, strict=True)), loss.detach()


@pytest.mark.parametrize(
    ("options", "alpha", "beta"), [({}, LR, LR), ({"alpha": 0.3}, 0.3, LR), ({"alpha": 0.3, "beta": 0.02}, 0.3, 0.02)]
)
def test_a_first_order_step_by_hand(options, alpha, beta):
    algorithm = PerFedAvg(**options)
    ctx, down, work = at_work(algorithm)
    work, metrics = algorithm.step(ctx, work, down, batch(10))
    grads, loss = meta_gradient(batch(10), 2, alpha, second_order=False)
    torch.testing.assert_close(metrics["loss"], loss)
    for name, value in leaves().items():
        torch.testing.assert_close(work["weights"][name], value.detach() - beta * grads[name])


def test_a_hessian_free_step_is_near_the_second_order_one():
    moves = {}
    for variant in ("fo", "hf"):
        algorithm = PerFedAvg(alpha=0.5, beta=1.0, variant=variant, delta=1e-2)
        ctx, down, work = at_work(algorithm)
        if variant == "fo":
            moves["fo"], _ = meta_gradient(batch(12), 3, 0.5, second_order=False)
            continue
        work, _ = algorithm.step(ctx, work, down, batch(12))
        moves["hf"] = {name: value.detach() - work["weights"][name] for name, value in leaves().items()}
    exact, _ = meta_gradient(batch(12), 3, 0.5, second_order=True)

    def distance(a, b):
        return sum((a[name] - b[name]).square().sum() for name in a).sqrt().item()

    assert distance(moves["hf"], exact) < 0.05 * distance(moves["fo"], exact)


def test_batches_are_cut_into_equal_parts():
    def cut(n, parts):
        rows = torch.arange(float(n))
        return [piece.x.int().tolist() for piece in split(Batch(rows, rows), parts)]

    assert cut(4, 2) == [[0, 1], [2, 3]]
    assert cut(6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert cut(5, 2) == [[0, 1, 2], [2, 3, 4]]  # an odd one belongs to both
    assert cut(1, 2) == [[0], [0]]
    assert cut(4, 3) == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(("variant", "parts"), [("fo", 2), ("hf", 3)])
def test_an_epoch_has_as_many_steps_as_there_are_tuples_of_batches(variant, parts):
    seen = []

    class Spy(PerFedAvg):
        def step(self, ctx, work, down, batch):
            seen.append(len(batch.y))
            return super().step(ctx, work, down, batch)

    simulate(blueprint(Spy(variant=variant), blobs(), rounds=1, batch_size=4), blobs(), points=("trained",))
    assert seen == [4 * parts] * sum(n // (4 * parts) for n in (20, 26, 33, 41))


def test_what_is_scored_is_adapted_by_steps_of_alpha():
    people = population()
    for options, steps in (({}, 1), ({"finetune_steps": 3}, 3)):
        algorithm = PerFedAvg(alpha=0.2, **options)
        server, records = simulate(plan(algorithm, people, net(batch_norm=False)), people)
        model = copy.deepcopy(net(batch_norm=False))
        model.load_state_dict(server.state["weights"])
        tuned = descend(model, *data(people, 1), steps, optimizer=lambda p: torch.optim.SGD(p, lr=0.2))
        test = people.clients[1].test
        expected = F.cross_entropy(tuned.eval()(torch.from_numpy(test.x)), torch.from_numpy(test.y)).item()
        found = {(s.point, s.client, s.split, s.metric): s.value for s in records[-1].scores}
        assert found["adapted", 1, "test", "loss"] == pytest.approx(expected, abs=1e-5)
        assert ("downloaded", 1, "test", "loss") not in found


def test_wording_of_refusals():
    people = blobs(2, sizes=(11, 20))
    check_trial(blueprint(PerFedAvg(), people, batch_size=6), people)  # one of them trains on less than two batches
    with pytest.raises(UsageError, match=r"the last ones of client 0 are shorter; use placement.vmap_clients=1"):
        check_trial(blueprint(PerFedAvg(variant="hf"), people, batch_size=5, vmap_clients=2), people)
