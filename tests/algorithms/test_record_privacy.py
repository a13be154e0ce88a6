"""DP-SGD of single records: the private gradient beside loops and Opacus, its noise, ε, and what does not change it."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.optimizers import DPOptimizer
from torch import nn

from helpers.federations import blobs, blueprint, net, new_server, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms import ditto, feddyn, fedprox, personal_heads, scaffold, server_optimizers
from rayfed.algorithms.common.private_training import PrivateTraining
from rayfed.algorithms.fedavg import FedAvg, Solo
from rayfed.core.batch import Batch
from rayfed.core.optim import SGD, Adam
from rayfed.core.private_gradients import PrivateBatch, filled_up, private_gradients, private_step
from rayfed.core.record_privacy import RecordPrivacy
from rayfed.core.trees import named_tensors
from rayfed.engine.clock import Availability
from rayfed.engine.device_data import poisson_rows
from rayfed.engine.host import LocalFleet
from rayfed.experiments.plan_record_privacy import _largest_batch

MODEL = net(batch_norm=False)
OPEN = RecordPrivacy(noise_multiplier=0, max_grad_norm=1e9)
METHODS = {
    "fedavg": FedAvg(),
    "fedprox": fedprox.FedProx(mu=0.3),
    "scaffold": scaffold.Scaffold(),
    "feddyn": feddyn.FedDyn(),
    "fedadam": server_optimizers.FedAdam(),
    "fedper": personal_heads.FedPer(),
    "fedrep": personal_heads.FedRep(),
    "ditto": ditto.Ditto(),
    "solo": Solo(),
}


def private(method=None, privacy=OPEN, **others):
    sigma = privacy.noise_multiplier
    return PrivateTraining(base=method or FedAvg(), privacy=privacy, sigma=sigma, **others)


def noisy(sigma=1.0, clip=0.5, delta=1e-3, **others):
    return private(privacy=RecordPrivacy(noise_multiplier=sigma, delta=delta, max_grad_norm=clip), **others)


def tensors(server):
    states = {str(client): server.fleet.states[client] for client in server.fleet.states}
    return dict(named_tensors({"server": server.state, "clients": states}))


def close(one, other, tolerance=1e-6):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance, msg=name)


# The gradient


def rows(count=7, seed=1):
    torch.manual_seed(seed)
    return torch.randn(count, 6), torch.randint(0, 3, (count,))


def batch_of(x, y, *, sigma=0.0, clip=0.5, expected=5.0, noise=None):
    weights = dict(MODEL.named_parameters())
    if noise is None:
        noise = {name: torch.zeros_like(value) for name, value in weights.items()}
    taken = torch.ones(len(y), dtype=torch.bool)
    return PrivateBatch(taken, x, y, noise, torch.tensor(clip), torch.tensor(expected))


def loss_of(weights, batch):
    return F.cross_entropy(torch.func.functional_call(MODEL, weights, (batch.x,)), batch.y), {}


def weights_of_model():
    return {name: value.detach() for name, value in MODEL.named_parameters()}


def by_loop(x, y, clip, expected):
    """The clipped sum by a loop over examples, in plain PyTorch; also how many gradients were longer than the bound."""
    total = {name: torch.zeros_like(value) for name, value in MODEL.named_parameters()}
    longer = 0
    for place in range(len(y)):
        loss = F.cross_entropy(MODEL(x[place : place + 1]), y[place : place + 1])
        grads = torch.autograd.grad(loss, list(MODEL.parameters()))
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        longer += norm > clip
        for name, grad in zip(total, grads, strict=True):
            total[name] += grad * min(1.0, clip / norm)
    return {name: value / expected for name, value in total.items()}, longer


@pytest.mark.parametrize(("clip", "some_are_longer"), [(0.5, True), (1.3, True), (100.0, False)])
def test_the_sum_of_clipped_gradients_is_that_of_a_loop(clip, some_are_longer):
    x, y = rows()
    expected, longer = by_loop(x, y, clip, 5.0)
    assert (longer > 0) == some_are_longer
    with private_step() as step:
        found = private_gradients(loss_of, weights_of_model(), batch_of(x, y, clip=clip))
    close(found, expected)
    assert step.loss.item() == pytest.approx(F.cross_entropy(MODEL(x), y).item(), rel=1e-5)


def test_rows_that_fill_up_a_batch_do_not_count():
    x, y = rows()
    with private_step():
        alone = private_gradients(loss_of, weights_of_model(), batch_of(x, y))
    with private_step() as step:
        filled = private_gradients(loss_of, weights_of_model(), filled_up(batch_of(x, y), 12))
    close(alone, filled)
    assert step.loss.item() == pytest.approx(F.cross_entropy(MODEL(x), y).item(), rel=1e-5)


def test_an_empty_batch_has_noise_alone():
    people = blobs(1, sizes=(20,))
    plan = blueprint(noisy(), people, model=MODEL, batch_size=1, local=Phase("train", steps=30), rounds=1)
    server = new_server(plan, people)
    exchange = plan.algorithm.round_exchanges[0]
    ctx = server.ctx.at(data=server.fleet.host._with_data(server.ctx.at(client=0, examples=20)).data, examples=20)
    empty = exchange.prepare(ctx, Batch(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)))
    assert empty.taken.tolist() == [False]
    with private_step():
        found = private_gradients(loss_of, weights_of_model(), empty)
    for name, value in found.items():
        assert torch.equal(value, empty.noise[name])
    assert len(list(server.run())) == 1  # some of the 30 batches are empty


def test_a_step_beside_the_optimiser_of_opacus():
    x, y = rows(9)
    clip, lr = 0.7, 0.3
    theirs = GradSampleModule(net(batch_norm=False))
    sgd = torch.optim.SGD(theirs.parameters(), lr=lr)
    optimiser = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its hooks
        F.cross_entropy(theirs(x), y).backward()
    optimiser.step()
    with private_step():
        grads = private_gradients(loss_of, weights_of_model(), batch_of(x, y, clip=clip, expected=9.0))
    for name, value in theirs._module.named_parameters():
        mine = weights_of_model()[name] - lr * grads[name]
        torch.testing.assert_close(mine, value.detach(), rtol=2e-6, atol=2e-6)  # theirs divides by the norm + 1e-6


# Whole rounds


@pytest.mark.parametrize("name", METHODS)
def test_without_noise_and_bound_full_batches_end_as_plain_ones(name):
    people = blobs()
    plan = blueprint(METHODS[name], people, model=MODEL, batch_size=100, rounds=3)
    plain, _ = simulate(plan, people)
    ours, _ = simulate(replace(plan, algorithm=private(METHODS[name])), people)
    close(tensors(plain), tensors(ours), 1e-5)


def test_without_noise_a_round_is_a_loop_over_the_records_of_poisson_batches():
    people = blobs(1)
    plan = blueprint(private(privacy=RecordPrivacy(noise_multiplier=0, max_grad_norm=0.4)), people, model=MODEL)
    plan = replace(plan, rounds=1, local=Phase("train", steps=4))
    drawn = []
    server = new_server(plan, people)
    host = server.fleet.host
    original = host.data.parts(0)["train"].take

    def take(rows):
        drawn.append(rows.tolist())
        return original(rows)

    host.data.parts(0)["train"].take = take
    for _ in server.run():
        pass
    assert len(drawn) == 4
    model = net(batch_norm=False)
    x = torch.from_numpy(people.clients[0].train.x)
    y = torch.from_numpy(people.clients[0].train.y)
    for rows_of_step in drawn:
        total = [torch.zeros_like(value) for value in model.parameters()]
        for row in rows_of_step:
            loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
            for sum_of, grad in zip(total, grads, strict=True):
                sum_of += grad * min(1.0, 0.4 / norm)
        with torch.no_grad():
            for value, sum_of in zip(model.parameters(), total, strict=True):
                value -= 0.05 * sum_of / 5
    close(server.state["weights"], {name: value.detach() for name, value in model.named_parameters()})


def test_poisson_batches_have_each_record_with_the_same_probability():
    rng = np.random.default_rng(0)
    batches = poisson_rows(40, Phase("train", steps=4000), 10, drop_last=True, rng=rng)
    assert len(batches) == 4000
    counts = np.bincount(np.concatenate(batches), minlength=40) / 4000
    assert abs(counts - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 4000)
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.mean() == pytest.approx(10, abs=0.2)
    assert sizes.var() == pytest.approx(40 * 0.25 * 0.75, rel=0.1)
    assert all(len(set(batch.tolist())) == len(batch) for batch in batches)
    assert len(poisson_rows(40, Phase("train", epochs=2), 10, drop_last=True, rng=rng)) == 8
    assert [len(batch) for batch in poisson_rows(7, Phase("train", epochs=1), 10, drop_last=True, rng=rng)] == [7]


def test_noise_is_drawn_anew_in_every_step_round_and_client():
    people = blobs(2, sizes=(20,))
    model = net(batch_norm=False)
    model.unused = nn.Linear(50, 40)  # moves by the noise alone
    sigma, clip, lr = 1.5, 0.3, 0.05
    plan = blueprint(noisy(sigma, clip), people, model=model, rounds=1, local=Phase("train", steps=3))
    server = new_server(plan, people, points=("trained",))
    start = model.unused.weight.detach().clone()
    ends = {}

    class Watched(FedAvg):
        def finish(self, ctx, work, client, down, data):
            ends[ctx.client] = work["weights"]["unused.weight"].clone()
            return super().finish(ctx, work, client, down, data)

    server.fleet.host.algorithm = replace(server.algorithm, base=Watched())
    for _ in server.run():
        pass
    first, second = (ends[client] - start for client in (0, 1))
    each = lr * sigma * clip / 5
    for moved in (first, second):  # three independent draws
        assert float(moved.std()) == pytest.approx(each * 3**0.5, rel=0.05)
    correlation = float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])
    assert abs(correlation) < 0.1


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.05, momentum=0.9, weight_decay=0.01), Adam(lr=0.01), SGD(lr=1, clip_norm=0.1)]
)
def test_optimisers_take_the_private_gradient(optimizer):
    people = blobs()
    plan = blueprint(FedAvg(), people, model=MODEL, batch_size=100, optimizer=optimizer)
    plain, _ = simulate(plan, people)
    ours, _ = simulate(replace(plan, algorithm=private()), people)
    close(tensors(plain), tensors(ours), 1e-4)


# ε


def epsilons(records):
    found = {}
    for record in records:
        for score in record.scores:
            if score.metric == "record_epsilon":
                assert (score.split, score.point) == ("train", "trained")
                assert not score.higher_is_better
                found[record.round, score.client] = score.value
    return found


@pytest.mark.parametrize(("accountant", "theirs"), [("rdp", RDPAccountant), ("prv", PRVAccountant)])
def test_epsilon_of_every_client_is_that_of_opacus(accountant, theirs):
    people = blobs(3)  # 20, 26 and 33 records
    privacy = RecordPrivacy(noise_multiplier=1.1, delta=1e-3, accountant=accountant)
    plan = blueprint(private(privacy=privacy), people, model=MODEL, rounds=3, cohort=2, local=Phase("train", epochs=2))
    server, records = simulate(plan, people)
    found = epsilons(records)
    steps = dict.fromkeys(range(3), 0)
    most = 0.0
    for record in records:
        cohort = server.sample(record.round)
        assert len(cohort) == 2
        for client in cohort:
            size = (20, 26, 33)[client]
            steps[client] += 2 * (size // 5)
            opacus = theirs()
            opacus.history = [(1.1, 5 / size, steps[client])]
            expected = opacus.get_epsilon(1e-3)
            assert found[record.round, client] == pytest.approx(expected, rel=1e-3)
            most = max(most, expected)
        assert record.epsilon == pytest.approx(most, rel=1e-3)
        assert (record.privacy_unit, record.delta, record.accountant) == ("record", 1e-3, accountant)
        assert record.neighbours == "add or remove a record"
    assert len(found) == 6


def test_all_phases_and_the_steps_that_clients_really_take_count():
    people = blobs(1, sizes=(20,))
    method = ditto.Ditto(personal_epochs=2)
    plan = blueprint(noisy(2.0), people, model=MODEL, rounds=2, local=Phase("train", epochs=3))
    plan = replace(plan, algorithm=replace(plan.algorithm, base=method), availability=Availability(least_work=0.3))
    server, records = simulate(plan, people)
    steps = 0
    for record in records:
        moment = server.ctx.moment._replace(stage="round", round=record.round)
        steps += 4 * (2 + plan.availability.local_work(plan.local, 0, moment, 0).epochs)
        opacus = RDPAccountant()
        opacus.history = [(2.0, 0.25, steps)]
        assert epsilons([record])[record.round, 0] == pytest.approx(opacus.get_epsilon(1e-3), rel=1e-2)


def test_clipping_alone_has_no_epsilon():
    people = blobs(2)
    plan = blueprint(private(privacy=RecordPrivacy(noise_multiplier=0)), people, model=MODEL)
    _, records = simulate(plan, people)
    assert epsilons(records) == {}
    assert [record.epsilon for record in records] == [None, None]


# What does not change the outcome


def test_clients_at_once_have_the_same_batches_and_noise():
    people = blobs(4)
    rows_of_batches = _largest_batch(5, np.array([20, 26, 33, 41]))
    plan = blueprint(noisy(rows=rows_of_batches), people, model=MODEL, rounds=3)
    alone, records = simulate(plan, people)
    together, others = simulate(replace(plan, vmap_clients=4), people)
    pairs, _ = simulate(replace(plan, vmap_clients=2), people)
    close(tensors(alone), tensors(together), 1e-5)
    close(tensors(alone), tensors(pairs), 1e-5)
    assert epsilons(records) == epsilons(others)
    unfilled, _ = simulate(replace(plan, algorithm=noisy()), people)
    close(tensors(alone), tensors(unfilled), 1e-5)


def test_a_block_has_the_same_bits_beside_other_clients():
    """Hosts may deal the clients of a cohort in other blocks."""
    people = blobs(4)
    rows_of_batches = _largest_batch(5, np.array([20, 26, 33, 41]))
    plan = blueprint(noisy(rows=rows_of_batches), people, model=MODEL, rounds=1, vmap_clients=2)
    server = new_server(plan, people)
    ctx = server.ctx.at(server.ctx.moment._replace(stage="round", round=1), cohort=(0, 1, 2, 3))
    down = plan.algorithm.broadcast(ctx, server.state)
    ends = {}
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        host = LocalFleet(plan, people).host
        for pair in (order[:2], order[2:]):
            request = server._request(plan.algorithm, ctx, True)
            request = replace(request, clients=tuple(sorted(pair)), vmap_clients=2)
            for job, trained in host._trained(plan.algorithm.round_exchanges[0], request, down, {}, {}):
                ends.setdefault(job.client, []).append(trained.work["weights"])
    for first, second in ends.values():
        for name in first:
            assert torch.equal(first[name], second[name])


def test_a_restored_server_goes_on_with_the_same_epsilon_and_weights():
    people = blobs(3)
    plan = blueprint(noisy(), people, model=MODEL, rounds=4)
    whole, records = simulate(plan, people)
    first = new_server(replace(plan, rounds=2), people)
    for _ in first.run():
        pass
    second = new_server(plan, people)
    second.state = first.state
    second.round = 2
    second.fleet.load([(client, first.fleet.states[client]) for client in first.fleet.states])
    second.restore_progress(first.progress() | {"rounds": 4})
    rest = list(second.run())
    assert second.state_hash() == whole.state_hash()
    assert epsilons(rest) == epsilons(records[2:])
    assert rest[-1].epsilon == records[-1].epsilon


def test_progress_of_other_methods_has_no_steps():
    people = blobs(2)
    server, _ = simulate(blueprint(FedAvg(), people), people)
    assert "steps_of_records" not in server.progress()
