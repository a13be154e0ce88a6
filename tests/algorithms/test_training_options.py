"""Options of local training that hold for every method: schedules, clipping, AdamW and label smoothing."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from helpers.algorithm_cases import everything
from helpers.federations import Point, blueprint, net, new_server, quadratic, quadratics, simulate
from helpers.reference import CLIENTS, LR, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithm import Phase
from rayfed.algorithms.apfl import APFL
from rayfed.algorithms.apple import APPLE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.personal_heads import FedBABU
from rayfed.algorithms.pfedme import PFedMe
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.lr_schedule import Exponential, LrSchedule
from rayfed.core.optim import SGD
from rayfed.core.trees import named_tensors

HALVING = Exponential(decay=0.5)


@pytest.mark.parametrize("width", [1, 3])
def test_each_round_trains_at_its_rate(width):
    """Rates 0.05, 0.1, 0.05 and 0.025: two rounds of warm-up to 0.1, which then halves."""
    people, model = population((12, 12, 12)), net()
    schedule = dataclasses.replace(HALVING, warmup=2)
    server = run(FedAvg(), people, model, rounds=4, schedule=schedule, vmap_clients=width, batch_size=12)
    for lr in (0.05, 0.1, 0.1, 0.05):
        trained = [
            descend(model, *data(people, i), 2, optimizer=lambda p, lr=lr: torch.optim.SGD(p, lr=lr)) for i in CLIENTS
        ]
        model = mean(trained, shares(people))
    assert_weights(server.state["weights"], model, atol=1e-5)


def test_scaffold_divides_by_the_rate_of_the_round():
    """After one step, a control variate is the gradient at the start, whatever the rate."""
    curves = quadratics((1.0, 1.0), (2.0, 2.0))
    changes = {"model": Point(), "loss": quadratic, "batch_size": 1, "optimizer": SGD(lr=0.1)}
    how = blueprint(
        Scaffold(), curves, rounds=2, local=Phase("train", steps=1), schedule=LrSchedule(warmup=4), **changes
    )
    server, _ = simulate(dataclasses.replace(how, rounds=4), curves)
    w = 0.0
    for lr in (0.025, 0.05, 0.075):  # equal clients without drift: the mean gradient h (w − a)
        w -= lr * ((w - 1) + 2 * (w - 2)) / 2
    for i, (h, a) in enumerate(((1.0, 1.0), (2.0, 2.0))):
        assert server.fleet.states[i]["c"]["w"].item() == pytest.approx(h * (w - a), abs=1e-5)


def context(algorithm, **moment):
    people = population()
    return plan(algorithm, people, net(), rounds=4, schedule=HALVING).context(people, "cpu").at(**moment)


def test_the_setup_the_final_stage_and_adaptation_are_not_scheduled():
    for stage, round, factor in (
        ("setup", 0, 1.0),
        ("round", 1, 1.0),
        ("round", 3, 0.25),
        ("final", 3, 1.0),
        ("final", 5, 1.0),
    ):
        ctx = context(FedBABU(), stage=stage, round=round)
        assert ctx.optimizer.lr == pytest.approx(LR * factor)
        assert ctx.scaled(3.0) == 3.0 * factor
    assert context(FedBABU(), stage="round", round=3).at(stage="final").optimizer.lr == pytest.approx(LR)
    assert context(FedBABU(), stage="round", round=3).at(step=7).optimizer.lr == pytest.approx(LR / 4)


@pytest.mark.parametrize("algorithm", [PFedMe(personal_lr=0.02), APPLE(relation_lr=0.2, initial="uniform"), APFL()])
def test_a_methods_own_rates_change_alike(algorithm):
    """A run of two rounds, of which the second halves the rates, ends as one whose second round has half the rates."""
    people = population()
    own = {"PFedMe": "personal_lr", "APPLE": "relation_lr"}.get(type(algorithm).__name__)
    scheduled = run(algorithm, people, net(False), rounds=2, schedule=HALVING)
    halved = dataclasses.replace(algorithm, **({own: getattr(algorithm, own) / 2} if own else {}))
    byhand = two_rounds(people, algorithm, halved)
    for path, value in named_tensors(everything(byhand)):
        torch.testing.assert_close(dict(named_tensors(everything(scheduled)))[path], value, rtol=1e-5, atol=1e-6)


def two_rounds(people, first, second):
    """Run one round of `first` at LR, then one of `second` at half of it, from the states that the first left."""
    plans = [plan(a, people, net(False), rounds=2, optimizer=SGD(lr=lr)) for a, lr in ((first, LR), (second, LR / 2))]
    servers = [new_server(p, people, every=9, points=("trained",)) for p in plans]
    records = servers[0].run()
    while servers[0].round < 1:
        next(records)
    servers[1].round, servers[1].state = 1, servers[0].state
    servers[1].fleet.load(dict(servers[0].fleet.states).items())
    list(servers[1].run())
    return servers[1]


def test_clipping_is_that_of_torch():
    people, model = population(), net()

    def clipped(parameters):
        parameters = list(parameters)
        optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.3) and None)
        return optimizer

    ours = SGD(lr=LR, momentum=0.9, clip_norm=0.3)
    server = run(FedAvg(), people, model, steps=3, rounds=1, optimizer=ours)
    trained = [descend(model, *data(people, i), 3, optimizer=clipped) for i in CLIENTS]
    assert_weights(server.state["weights"], mean(trained, shares(people)), atol=1e-5)
    free = run(FedAvg(), people, model, steps=3, rounds=1, optimizer=SGD(lr=LR, momentum=0.9))
    assert not torch.allclose(free.state["weights"]["fc.weight"], server.state["weights"]["fc.weight"], atol=1e-3)


def test_clipping_bounds_the_gradient_of_pfedmes_personal_model_and_not_the_pull():
    """On h/2 (v − a)² with h a = 40, a gradient clipped to 1: v = 0.1·1 after a step, and w = λ·lr·v."""
    curves = quadratics((4.0, 10.0))
    changes = {"model": Point(), "loss": quadratic, "batch_size": 1, "optimizer": SGD(lr=0.01, clip_norm=1.0)}
    method = PFedMe(lam=15.0, inner_steps=1, personal_lr=0.1, decay=0.0)
    how = blueprint(method, curves, rounds=1, local=Phase("train", steps=1), **changes)
    server, _ = simulate(how, curves)
    assert server.fleet.states[0]["model"]["w"].item() == pytest.approx(0.1, abs=1e-5)
    assert server.state["weights"]["w"].item() == pytest.approx(0.01 * 15 * 0.1, abs=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_label_smoothing_trains_but_does_not_score(width):
    people, model = population((12, 12, 12)), net()

    def smoothed(logits, y):
        return F.cross_entropy(logits, y, label_smoothing=0.2)

    how = plan(FedAvg(), people, model, rounds=1, training_loss=smoothed, vmap_clients=width, batch_size=12)
    server, records = simulate(how, people)

    def by_definition(m, x, y):
        target = F.one_hot(y, 3) * 0.8 + 0.2 / 3
        return -(target * m(x).log_softmax(1)).sum(1).mean()

    trained = mean([descend(model, *data(people, i), 2, loss=by_definition) for i in CLIENTS], shares(people))
    assert_weights(server.state["weights"], trained, atol=1e-5)
    test = people.clients[0].test
    plain = F.cross_entropy(trained.eval()(torch.from_numpy(test.x)), torch.from_numpy(test.y)).item()
    (loss,) = [s.value for s in records[0].scores if s.metric == "loss" and s.split == "test" and s.client == 0]
    assert loss == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_bf16_rounds_products_and_nothing_that_is_kept(width):
    """Layers compute as under torch.autocast; weights, momentum, sums and scores are those of float32."""
    people, model = population((12, 12, 12)), net(batch_norm=width == 1)  # torch has no such batch norm under vmap
    changes = {"optimizer": SGD(lr=LR, momentum=0.9), "batch_size": 12, "rounds": 1, "vmap_clients": width}
    rounded, exact = (run(FedAvg(), people, model, bf16=bf16, **changes) for bf16 in (True, False))
    trained = []
    for i in CLIENTS:
        own, (x, y) = copy.deepcopy(model), data(people, i)
        sgd = torch.optim.SGD(own.parameters(), lr=LR, momentum=0.9)
        for _ in range(2):
            sgd.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(own(x), y)
            loss.backward()
            sgd.step()
        trained.append(own)
    assert_weights(rounded.state["weights"], mean(trained, shares(people)), atol=2e-4)
    assert all(value.dtype == exact.state["weights"][name].dtype for name, value in rounded.state["weights"].items())
    differences = [
        (value - exact.state["weights"][name]).abs().max() for name, value in rounded.state["weights"].items()
    ]
    assert 1e-4 < max(differences) < 0.05
    logits = rounded.ctx.task.predict(rounded.state["weights"], data(people, 0)[0])
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
